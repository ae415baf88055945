"""What `gradsight influence RUN_DIR --export keep.txt` and `--export weights.csv` write, in a plain
PyTorch data loader.

    loader = DataLoader(dataset, batch_size=32, sampler=kept("keep.txt"))
    loader = DataLoader(dataset, batch_size=32, sampler=weighted("weights.csv", len(dataset)))

Sample ids are the numbers of the dataset's items, as they were given to
`GhostEngine.observe(sample_ids=...)`.
"""

import csv

from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler


def kept(file: str) -> SubsetRandomSampler:
    """Every sample of the list once per epoch, in random order."""
    with open(file) as lines:
        return SubsetRandomSampler([int(line) for line in lines if not line.startswith("#")])


def weighted(file: str, samples: int) -> WeightedRandomSampler:
    """As many draws per epoch as there are samples, each by its weight; samples that were never
    scored weigh 1.
    """
    weights = [1.0] * samples
    with open(file) as lines:
        for row in csv.DictReader(line for line in lines if not line.startswith("#")):
            weights[int(row["sample_id"])] = float(row["weight"])
    return WeightedRandomSampler(weights, num_samples=samples)
