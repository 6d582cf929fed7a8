"""The article's claims, each with what arithmetic says of it and which record speaks to it.

The source reports a motion model trained in 7 days instead of 25. Its cluster, model, clips and
training run are not named, so nobody can repeat it as a whole; what can be measured is each idea by
itself, against a stated baseline.
"""

import dataclasses
from collections.abc import Sequence

from wamlab.measure import Record

HOURS_OFFLINE, CLIPS, FRAMES, FEATURES = 11, 128_000, 600, 212


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim.

    Attributes:
        text: what the article says, in short.
        check: what its own numbers allow, or why it cannot be repeated.
        record: name of the record of scope "motion" that speaks to it; None: none can.
        shows: fields of that record to quote, as (words, field, format).
    """

    text: str
    check: str
    record: str | None = None
    shows: tuple[tuple[str, str, str], ...] = ()


CLAIMS: tuple[Claim, ...] = (
    Claim(
        text="25 days become 7; 1.7e4 frames a day become 6.5e4",
        check=f"25 to 7 is {25 / 7:.2f}× in days, {6.5 / 1.7:.2f}× in frames a day: two ratios, "
        f"never mixed. 25 days at 1.7e4 are {25 * 1.7e4 / 120 / 60:.0f} minutes of motion at "
        f"120 Hz, {25 * 1.7e4 / CLIPS:.1f} frames a clip: as frames implausible, as windows "
        f"{25 * 1.7e4 / CLIPS:.1f} epochs. Cluster, model and clips are unnamed.",
    ),
    Claim(
        text="39 % fewer steps to the same error",
        check=f"A system change leaves the steps alone. {6.5 / 1.7:.2f}× throughput and 0.61× "
        f"steps would give {25 / (6.5 / 1.7 / 0.61):.1f} days, not 7, at an equal batch.",
    ),
    Claim(
        text="loading and copies are up to 87 % of the latency",
        check="Cannot share a whole with 35 % of waiting for communication; 'up to' is a worst "
        "moment. By ablation, with files parsed at every access:",
        record="data_path",
        shows=(
            ("waiting, text", "text_wait_share", "{:.0%}"),
            ("waiting, packed and prefetched", "prefetch_wait_share", "{:.1%}"),
        ),
    ),
    Claim(
        text="11 hours of offline augmentation become less than a millisecond online",
        check=f"{HOURS_OFFLINE} h for {CLIPS:,} clips are "
        f"{HOURS_OFFLINE * 3.6e6 / CLIPS:.0f} ms a clip: the gain is vectorisation.",
        record="augmentation",
        shows=(("ms a clip", "own_ms", "{:.3g}"), ("over clip by clip", "ratio", "{:.1f}×")),
    ),
    Claim(
        text="a motion-aware cache keeps what is read again",
        check=f"All clips as features are {CLIPS * FRAMES * FEATURES * 2 / 1e9:.0f} GB: they fit "
        "one large GPU. Under shuffled epochs no policy beats the cache's share:",
        record="cache",
        shows=(("misses of LRU over lookahead's, weighted draws", "ratio", "{:.2f}×"),),
    ),
    Claim(
        text="serial Jacobians become batched, block-sparse ones",
        check="Sound; a serial loop is a straw man, vmap(jacrev) the fair baseline.",
        record="jacobian",
        shows=(
            ("over serial", "ratio", "{:.0f}×"),
            ("over vmap(jacrev)", "over_jacrev", "{:.1f}×"),
            ("largest difference", "max_abs_diff", "{:.0e}"),
        ),
    ),
    Claim(
        text="time is split into semantic blocks that train in parallel",
        check="Teacher forcing has no chain through time to begin with: the gain exists against a "
        "serial loop over blocks alone, with the same gradients.",
        record="block_parallel",
        shows=(
            ("over serial", "ratio", "{:.1f}×"),
            ("gradients differ by", "gradient_rel_diff", "{:.0e}"),
        ),
    ),
    Claim(
        text="waiting for communication falls from 35 % to below 9 % of a step",
        check=f"By itself worth {0.91 / 0.65:.2f}×; needs a slow link to show (notebook 07).",
    ),
    Claim(
        text="gradients are compressed in buckets with abrupt dynamics, without loss",
        check="A bucket holds parameters, averaged over a batch: it has no take-off or landing. "
        "Tested as one gate among five at equal bytes (notebook 07).",
    ),
    Claim(
        text="an error of at most 2.3 cm",
        check="No joints, alignment or task are given. Here: all joints, the first frame aligned, "
        "blocks of held-out motions continued from their past.",
        record="training",
        shows=(
            ("held-out error, cm", "mpjpe_cm", "{:.1f}"),
            ("standing still, cm", "hold_cm", "{:.1f}"),
        ),
    ),
    Claim(
        text="microsecond time steps, nanosecond clock offsets, groups regardless of place",
        check=f"Motion capture has {1000 / 120:.1f} ms a frame; topology-aware means place; no "
        "method is given. Not reproducible.",
    ),
)


def ledger(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Return (claim, check, measured) rows; the last record of a name counts, bf16 aside.

    Args:
        records: of scope "motion"; a claim whose record is missing says "not measured here".
    """
    by_name = {r.name: r for r in records if r.precision != "bf16"}
    return [(c.text, c.check, _found(c, by_name.get(c.record))) for c in CLAIMS]


def _found(claim: Claim, record: Record | None) -> str:
    if claim.record is None:
        return "–"
    if record is None:
        return "not measured here"
    values = record.extra | ({"own_ms": record.step_ms.median} if record.step_ms else {})
    parts = [f"{words} {form.format(values[field])}" for words, field, form in claim.shows]
    return "; ".join(parts)
