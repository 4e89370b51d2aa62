// An accelerator for tests, on torch's PrivateUse1 device: memory of its own, streams, allocator.
//
// Work is enqueued on streams, which are threads that are late by chance. The host cannot read or
// write device memory: its addresses are mapped without access, and kernels reach the same bytes by
// a second mapping.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace backend {

// A point in a stream. `seconds` is when it was reached, of a steady clock.
struct Point;

// Memory as kernels address it, for a device address.
void* reachable(const void* address);

// Pinned host memory contains this address.
bool is_pinned(const void* address);

// The stream that torch uses in this thread.
c10::Stream current_stream();

// Enqueue work on a stream. It may only hold addresses, which the order of the stream keeps valid.
void enqueue(c10::Stream stream, std::function<void()> work);

// Wait for all work of a stream, and throw what failed in it since the last wait.
void wait(c10::Stream stream);

// Allocate and free as torch's tensors do, so that a storage can be resized.
void resize(c10::StorageImpl* storage, size_t nbytes);

c10::Allocator* allocator();

} // namespace backend
