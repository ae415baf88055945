"""What a reader takes of a stranger's file, at most: checked before anything is made of it.

Each limit is beyond what Gradsight itself writes, and small enough that no reading command takes
more than 2 GiB of memory, or 30 seconds beyond reading the files once. SECURITY.md tells users.
No torch.
"""

DOCUMENT_BYTES = 1 << 26
"""Bytes of a JSON file."""
CONTAINERS = 1 << 20
"""Lists and objects in a JSON file: two bytes of text become a hundred of memory each."""
COMMAS = 1 << 21
"""Commas in a JSON file, and so about its values."""
DEPTH = 64
"""Lists and objects inside each other."""
NUMBER = (1 << 63) - 1
"""The largest count, size or step: what 64 bits hold."""
DIMENSIONS = 32
"""Dimensions of a tensor, half of what numpy knows."""
MANIFESTS_BYTES = 1 << 25
"""Bytes of all manifests of one kind that a report or `dump list` reads; it leaves out the rest."""
CHUNKS_ENTANGLED = 256
"""Pieces of one tensor that no straight cut parts: more are not compared each with each."""
CHUNKS_COMPARED = 4096
"""Pieces of a gradient that `dump diff` compares with a gradient that lies in other pieces."""
ENTRIES_AT_ONCE = 1 << 22
"""Entries of a gradient that a command holds in memory at a time."""
ENTRIES_SORTED = 1 << 25
"""Entries of a gradient whose quantiles are told: for them all are held at a time."""
ENTRIES_MEASURED = 1 << 29
"""Entries that one `dump show` measures; of further gradients it shows the shape."""
MODEL_BYTES = 1 << 29
"""Bytes of the parameters of a model that `replay` builds from a stranger's settings."""
ACTIVATION_BYTES = 1 << 29
"""Bytes that running a stranger's batch through it is let take, by a rough estimate."""
INCIDENTS = 10_000
"""Incidents of a run that are read."""
INCIDENTS_BYTES = 1 << 26
"""Bytes of incident.json of all of them: the rest is named, and not read."""
RANKS = 4096
"""Parts of one incident, written by ranks, that are read."""
PASSES = 4096
"""Calls of the model in one incident."""
OPTIMIZERS = 1000
"""Optimizers of a script that a check tells of."""
MODELS = 100
"""Runs inside a run directory, one for each model of a script."""
FRAME_BYTES = 1 << 26
"""Bytes of one frame of a run's tail, and of one value of its record."""
TAIL_BYTES = 1 << 30
"""Bytes of a run's tail: readers hold it in memory. The writer stops there."""
TAIL_FRAMES = 1 << 19
"""Frames of a run's tail. The writer stops there; it publishes a tenth of them."""
STEPS = 1_200_000
"""Steps of a run: a report holds them all in memory."""
SCALARS = 2_000_000
"""Scalars of a run that were logged by name, and as many of trackers."""
RECORDS = 50_000
"""Findings and problems of a run; and histograms of steps."""
HISTOGRAM_BYTES = 1 << 24
"""Bytes that the histograms of one step unpack to: those of some 16,000 parameters."""
HISTOGRAMS_BYTES = 1 << 27
HISTOGRAMS = 250_000
"""Bytes of unpacked histograms, and histograms, that a report looks at."""
NAMES = 1 << 20
"""Parameters of a model."""
RECORD_TEXT_BYTES = 1 << 25
"""Bytes of all findings of a run, and of all its problems."""
QUIET_OPERATIONS = 2000
"""Times 100,000 operations of SQLite without a row: some ten seconds of work."""
SCORE_FILE_BYTES = 1 << 29
"""Bytes of one score file."""
SCORE_UNPACKED_BYTES = 1 << 30
"""Bytes that one score file unpacks to."""
SCORE_ROWS = 1 << 22
"""Rows of one score file."""
SCORE_VALUES = 1 << 27
"""Numbers and texts in one score file."""
SCORE_ROWS_SHOWN = 1 << 23
"""Rows of all score files of a run that a report is made of."""
