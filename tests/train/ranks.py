"""Run on two gloo ranks by test_ranks.py: trains every configuration it is given, and resumes it."""

import json
import sys
import warnings

import torch

from gradsight.cli import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    torch.distributed.init_process_group("gloo")
    for tokens in json.loads(sys.argv[1]):
        code = main(["train", *tokens])
        assert code == 0, (tokens, code)
    torch.distributed.destroy_process_group()
