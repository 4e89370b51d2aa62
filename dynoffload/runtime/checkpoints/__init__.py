"""Checkpoints: what a training run is, in a directory that plain tools can read.

    checkpoint.json                         what the run is, and every file with size and checksum
    model.safetensors                       parameters and buffers, by the model's own names
    optimizer.safetensors                   optimizer state, as <parameter>.<key>
    extra.safetensors                       tensors of schedulers, scalers, random numbers

Where a set passes ``max_shard_size`` it is ``model-00001-of-00003.safetensors`` and so on, with
``model.safetensors.index.json``, as Hugging Face writes them. Nothing is ever unpickled.

From the ground up: `values` (JSON of what is not a tensor), `tensors` (bytes of a tensor, piece by
piece), `shards` (safetensors files), `manifest` (``checkpoint.json``), `directory` (one that takes
another's place at once), `contents` (what a model and an optimizer hold), `randomness`, `saving`,
and `loading`. Of several processes `peers` are who save together, `extents` says where in a whole
tensor a part lies, `ranges` which bytes of a file that is, and `alike` compares what they hold in
common. What users call stands above, in `runtime.checkpointing`.
"""
