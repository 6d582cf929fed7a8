"""What tests/test_profile.py starts on two ranks: a toy run, profiled."""

import time

from toy_model import ToyLoader, ToyModel

from wamlab.config import from_dict
from wamlab.dist import device, rank
from wamlab.train.communication import training_group
from wamlab.train.profile import ProfileConfig, profile_trainer


class Uneven(ToyLoader):
    """Rank 1 waits for its data."""

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.05 * rank())
            yield batch


def run(config):
    with training_group(device("cpu")):
        return profile_trainer(from_dict(ProfileConfig, config), ToyModel(), Uneven)
