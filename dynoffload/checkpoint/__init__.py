"""Checkpoints: the full state of a training run, in a directory that standard tools can read.

    checkpoint.json                         non-tensor values; size and checksum of every file
    model.safetensors                       parameters and buffers, by the model's own names
    optimizer.safetensors                   optimizer state, as <parameter>.<key>
    extra.safetensors                       tensors of schedulers, scalers, random numbers

A set larger than ``max_shard_size`` is split as by Hugging Face, with an index file:
``model-00001-of-00003.safetensors``, ``model.safetensors.index.json``. Nothing is ever unpickled.

The public functions are in `dynoffload.runtime.checkpointing`.
"""
