"""LIBERO's side of the closed loop: runs in the simulator's own environment, imports no wamlab.

    python libero_client.py rollout --port 8000 --out DIR     # a served policy acts
    python libero_client.py record --out DIR                  # a script acts, and shakes

Both write one episode_NNN.npz an episode and a line of results.jsonl. What a policy sees and does
is as in the public LIBERO data: cameras turned by 180 degrees; state = hand position (m), hand
rotation vector (rad), two fingers (m); action = steps in units of 0.05 m and 0.5 rad, gripper -1
open and 1 closed.
"""

import argparse
import json
import math
import time
from pathlib import Path

import mujoco
import numpy as np
from libero.libero import benchmark, get_libero_path
from libero.libero.envs import OffScreenRenderEnv

IDLE = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
SETTLE_STEPS = 10  # objects fall onto the table first
CAMERAS = {"image": "agentview_image", "wrist_image": "robot0_eye_in_hand_image"}
STEP_M = 0.05
FRAME_EVERY = 2  # steps; a policy goes on with 8 frames spread over its chunk of 16


class World:
    """One task of a suite.

    Args:
        suite: such as libero_spatial.
        task: its number in the suite.
        side: pixels of the square images.
        hard: build the scene anew at every reset, as the benchmark does, which takes seconds.
        shadows: as the benchmark draws; without them a CPU needs half the time.
    """

    def __init__(self, suite: str, task: int, *, side: int, hard: bool, shadows: bool) -> None:
        tasks = benchmark.get_benchmark(suite)(task_order_index=0)
        row, self.shadows = tasks.get_task(task), shadows
        self.task, self.starts = row.language, tasks.get_task_init_states(task)
        file = Path(get_libero_path("bddl_files")) / row.problem_folder / row.bddl_file
        self.env = OffScreenRenderEnv(
            bddl_file_name=str(file), camera_heights=side, camera_widths=side, hard_reset=hard
        )

    def reset(self, number: int, official: bool) -> dict:
        """Lay the table: an official start of the benchmark, or a new one drawn from a seed."""
        self.env.seed(number)
        self.env.reset()
        flags = self.env.sim._render_context_offscreen.scn.flags
        flags[mujoco.mjtRndFlag.mjRND_SHADOW] = self.shadows
        flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = self.shadows
        if official:
            self.env.set_init_state(self.starts[number % len(self.starts)])
        for _ in range(SETTLE_STEPS):
            seen, *_ = self.env.step(IDLE)
        return seen

    def step(self, action: np.ndarray) -> tuple[dict, bool]:
        """Act once; return what is seen and whether the task is solved."""
        seen, _, done, _ = self.env.step(np.clip(action, -1.0, 1.0))
        return seen, bool(done)


def observation(seen: dict) -> dict[str, np.ndarray]:
    """Return the images uint8 [H, W, 3] and the state float32 [8] of one moment."""
    views = {k: np.ascontiguousarray(seen[v][::-1, ::-1]) for k, v in CAMERAS.items()}
    turn = rotation_vector(seen["robot0_eef_quat"])
    state = np.concatenate([seen["robot0_eef_pos"], turn, seen["robot0_gripper_qpos"]])
    return views | {"state": state.astype(np.float32)}


def rotation_vector(xyzw: np.ndarray) -> np.ndarray:
    """Return axis times angle (rad) of a quaternion."""
    w = min(max(float(xyzw[3]), -1.0), 1.0)
    sine = math.sqrt(1.0 - w * w)
    return np.zeros(3) if sine < 1e-8 else xyzw[:3] * 2.0 * math.acos(w) / sine


class Script:
    """Takes a bowl by its rim and sets it on the plate, from the simulator's true positions."""

    RIM_M = 0.048  # from the bowl's centre to its wall
    OVER, DOWN, SHUT, LIFT, ACROSS, LOWER, LET_GO, AWAY = range(8)

    def __init__(self, bowl: str, plate: str) -> None:
        self.bowl, self.plate = bowl, plate
        self.phase, self.waited = self.OVER, 0

    def __call__(self, seen: dict) -> np.ndarray:
        """Return the next action [7]."""
        hand, bowl = seen["robot0_eef_pos"], seen[f"{self.bowl}_pos"]
        goal, grip = self._goal(bowl, seen[f"{self.plate}_pos"])
        gap = goal - hand
        self.waited += 1
        if self._finished(float(np.linalg.norm(gap))):
            self.phase, self.waited = self.phase + 1, 0
        return np.array([*np.clip(gap / STEP_M, -1.0, 1.0), 0.0, 0.0, 0.0, grip])

    def _goal(self, bowl: np.ndarray, plate: np.ndarray) -> tuple[np.ndarray, float]:
        lifted = np.array([*bowl[:2], plate[2]])  # the bowl rises with the hand, the plate does not
        place, height = {
            self.OVER: (bowl, 0.12),
            self.DOWN: (bowl, 0.035),
            self.SHUT: (bowl, 0.035),
            self.LIFT: (lifted, 0.17),
            self.ACROSS: (plate, 0.17),
            self.LOWER: (plate, 0.055),
            self.LET_GO: (plate, 0.055),
            self.AWAY: (plate, 0.20),
        }[self.phase]
        grip = 1.0 if self.SHUT <= self.phase <= self.LOWER else -1.0
        return place + np.array([0.0, self.RIM_M, height]), grip

    def _finished(self, gap_m: float) -> bool:
        if self.phase in (self.SHUT, self.LET_GO):
            return self.waited >= 12
        return gap_m < 0.012 and self.phase < self.AWAY


def record(args: argparse.Namespace, world: World) -> None:
    """Write demonstrations: the script's actions, executed with noise, so that it must recover."""
    for number in range(args.first, args.first + args.episodes):
        seen, rng = world.reset(number, official=False), np.random.default_rng(number)
        script, rows, solved, after = Script(*world.env.obj_of_interest), [], False, 0
        while len(rows) < args.steps and after < args.rest:
            action = script(seen)
            rows.append(observation(seen) | {"actions": action.astype(np.float32)})
            shake = rng.normal(0.0, args.noise, 7) * [1, 1, 1, 0, 0, 0, 0]
            seen, done = world.step(action + shake)
            solved = solved or done
            after += solved
        keep(args, number, rows, {"task": world.task, "success": solved, "steps": len(rows)})


def rollout(args: argparse.Namespace, world: World) -> None:
    """Let the served policy act from the benchmark's own starts."""
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    policy = WebsocketClientPolicy("127.0.0.1", args.port)
    for number in range(args.first, args.first + args.episodes):
        seen, rows, solved, start = world.reset(number, official=True), [], False, time.monotonic()
        recent = [observation(seen)]
        while len(rows) < args.steps and not solved:
            actions = policy.infer(request(recent, world.task, f"{args.task}-{number}"))["actions"]
            recent, actions = [], actions[: args.steps - len(rows)]
            for step, action in enumerate(actions, 1):
                rows.append(observation(seen) | {"actions": action})
                seen, solved = world.step(action)
                if solved or step % FRAME_EVERY == 0 or step == len(actions):
                    recent.append(observation(seen))
                if solved:
                    break
        seconds = round(time.monotonic() - start, 2)
        found = {"task": world.task, "success": solved, "steps": len(rows), "seconds": seconds}
        keep(args, number, rows, found)


def request(recent: list[dict], task: str, session: str) -> dict:
    """Return what the policy is sent: the frames since its last chunk, and the present state."""
    views = {
        f"observation/{name}": np.stack([moment[name] for moment in recent]) for name in CAMERAS
    }
    return views | {
        "observation/state": recent[-1]["state"],
        "prompt": task,
        "session_id": session,
    }


def keep(args: argparse.Namespace, number: int, rows: list[dict], found: dict) -> None:
    """Write one episode's file and its line of results.jsonl."""
    columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    np.savez(args.out / f"episode_{number:03d}.npz", task=np.array(found["task"]), **columns)
    line = json.dumps({"episode": number, **found})
    with (args.out / "results.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("rollout", "record"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suite", default="libero_spatial")
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first episode's number")
    parser.add_argument("--episodes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=220, help="at most, an episode")
    parser.add_argument("--side", type=int, default=256, help="pixels of the images")
    parser.add_argument("--shadows", type=int, default=1, choices=(0, 1), help="and reflections")
    parser.add_argument("--port", type=int, default=8000, help="(rollout) of the policy server")
    parser.add_argument("--noise", type=float, default=0.15, help="(record) in the action's units")
    parser.add_argument("--rest", type=int, default=24, help="(record) steps after success")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    how = {"side": args.side, "hard": args.what == "rollout", "shadows": bool(args.shadows)}
    world = World(args.suite, args.task, **how)
    {"rollout": rollout, "record": record}[args.what](args, world)
    world.env.close()


if __name__ == "__main__":
    main()
