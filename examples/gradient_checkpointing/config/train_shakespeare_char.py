"""A GPT of about ten million parameters that learns text byte by byte, small enough for two cores.

Only assignments: `gradsight train --config` reads this file and never runs it. Any option on the
command line wins over it.
"""

out_dir = "Results"
log_interval = 1
eval_interval = 500
eval_iters = 1  # batches of each split

batch_size = 16
block_size = 256
gradient_accumulation_steps = 1

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.0

learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 100
max_iters = 2000
beta2 = 0.99
weight_decay = 1e-1
grad_clip = 1.0
