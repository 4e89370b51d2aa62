"""Checkpoints: what a training run is, in a directory that plain tools can read.

    checkpoint.json                         what the run is, and every file with size and checksum
    model.safetensors                       parameters and buffers, by the model's own names
    optimizer.safetensors                   optimizer state, as <parameter>.<key>
    extra.safetensors                       tensors of schedulers, scalers, random numbers

Where a set passes ``max_shard_size`` it is ``model-00001-of-00003.safetensors`` and so on, with
``model.safetensors.index.json``, as Hugging Face writes them. Nothing of a file is ever unpickled.

What users call stands above, in `dynoffload.runtime.checkpointing`.
"""
