#include "device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

namespace backend {
namespace {

constexpr c10::DeviceType TYPE = c10::DeviceType::PrivateUse1;
constexpr size_t SPACE = size_t(16) << 30; // addresses
constexpr size_t ROUND = 512; // bytes, as of CUDA's allocator
constexpr size_t SEGMENT = size_t(2) << 20; // least bytes taken from the device at once
constexpr int STREAMS = 9; // the default one, and those that torch asks for in turn
constexpr int POISON = 0xFB;

const c10::Device DEVICE(TYPE, 0);
const pid_t process = getpid();

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

char* mapped(size_t nbytes, int protection) {
  void* address = mmap(
      nullptr, nbytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "the backend for tests cannot map ", nbytes, " bytes");
  return static_cast<char*>(address);
}

// The addresses that torch sees, and those by which kernels reach the same bytes.
struct Space {
  char* shown = mapped(SPACE, PROT_NONE);
  char* bytes = mapped(SPACE, PROT_READ | PROT_WRITE);
};

Space& space() {
  static auto* made = new Space;
  return *made;
}

} // namespace

void* reachable(const void* address) {
  size_t offset = static_cast<const char*>(address) - space().shown;
  TORCH_CHECK(!address || offset < SPACE, "a kernel is given an address of the host");
  return address ? space().bytes + offset : nullptr;
}

// Streams and events

struct Point {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  double seconds = 0;

  void reach() {
    std::lock_guard<std::mutex> lock(mutex);
    reached = true;
    seconds = now();
    changed.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return reached; });
  }

  bool is_reached() {
    std::lock_guard<std::mutex> lock(mutex);
    return reached;
  }
};

namespace {

struct Settings {
  std::atomic<uint64_t> seed{0};
  std::atomic<uint64_t> round{0}; // of settings: each begins the delays anew
  std::atomic<int> delay_us{0}; // the longest; one of eight jobs is late
  std::atomic<size_t> limit{SPACE};
  std::atomic<int64_t> kernels{0};
} settings;

// A stream's thread. Never freed, as its thread ends with the process.
class Worker {
 public:
  explicit Worker(int number) : number_(number) {
    std::thread([this] { run(); }).detach();
  }

  void enqueue(std::function<void()> job) {
    TORCH_CHECK(getpid() == process, "a forked process cannot use the backend for tests");
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    ++queued_;
    changed_.notify_one();
  }

  std::shared_ptr<Point> mark() {
    auto point = std::make_shared<Point>();
    enqueue([point] { point->reach(); });
    return point;
  }

  void wait() {
    mark()->wait();
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) {
      std::rethrow_exception(std::exchange(failure_, nullptr));
    }
  }

 private:
  void run() {
    std::minstd_rand chance;
    uint64_t round = ~uint64_t(0);
    while (true) {
      std::function<void()> job;
      // To wake a thread takes the host longer than most operators, and a device is not woken.
      auto idle = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
      while (!queued_ && std::chrono::steady_clock::now() < idle) {
      }
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !jobs_.empty(); });
        job = std::move(jobs_.front());
        jobs_.pop_front();
        --queued_;
      }
      if (round != settings.round) {
        round = settings.round;
        chance.seed(settings.seed * 31 + number_ + 1);
      }
      int delay = settings.delay_us;
      if (delay && chance() % 8 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(chance() % delay));
      }
      try {
        job();
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex_);
        failure_ = std::current_exception();
      }
    }
  }

  const int number_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  std::atomic<int> queued_{0};
  std::exception_ptr failure_;
};

Worker& worker(c10::StreamId id) {
  static std::mutex mutex;
  static auto* made = new std::map<c10::StreamId, Worker*>;
  std::lock_guard<std::mutex> lock(mutex);
  auto& found = (*made)[id];
  if (!found) {
    found = new Worker(static_cast<int>(id));
  }
  return *found;
}

thread_local c10::StreamId current = 0;
std::atomic<c10::StreamId> asked_for{0};

c10::Stream stream_of(c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, DEVICE, id);
}

void wait_for_all() {
  for (c10::StreamId id = 0; id < STREAMS && id <= asked_for; ++id) {
    worker(id).mark()->wait();
  }
}

} // namespace

c10::Stream current_stream() {
  return stream_of(current);
}

void enqueue(c10::Stream stream, std::function<void()> work) {
  ++settings.kernels;
  worker(stream.id()).enqueue(std::move(work));
}

void wait(c10::Stream stream) {
  worker(stream.id()).wait();
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  struct Event {
    std::shared_ptr<Point> point;
  };

  c10::DeviceType type() const override {
    return TYPE;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return DEVICE;
  }
  c10::Device getDevice() const override {
    return DEVICE;
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  c10::Stream getStream(c10::Device) const override {
    return current_stream();
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return stream_of(0);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return stream_of(asked_for++ % (STREAMS - 1) + 1);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current, stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait(stream);
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    wait_for_all();
    for (c10::StreamId id = 0; id < STREAMS && id <= asked_for; ++id) {
      wait(stream_of(id)); // throws what failed
    }
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag)
      const override {
    if (!*event) {
      *event = new Event;
    }
    static_cast<Event*>(*event)->point = worker(stream.id()).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) {
      auto point = static_cast<Event*>(event)->point;
      worker(stream.id()).enqueue([point] { point->wait(); });
    }
  }
  bool queryEvent(void* event) const override {
    return !event || static_cast<Event*>(event)->point->is_reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event) {
      static_cast<Event*>(event)->point->wait();
    }
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    synchronizeEvent(begin);
    synchronizeEvent(end);
    auto seconds = [](void* event) { return static_cast<Event*>(event)->point->seconds; };
    return (seconds(end) - seconds(begin)) * 1e3;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Memory. A block that is free again belongs to the stream that used it: its later work follows
// all earlier one by order, so it can have the block at once.

struct Block {
  size_t segment; // where its segment begins
  size_t nbytes;
  c10::StreamId stream;
  bool free;
  std::set<c10::StreamId> others; // that use it too
};

class CachingAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* address = nbytes ? take(nbytes) : nullptr;
    return {address, address, &give_back, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    auto *to = reachable(target), *from = reachable(source);
    enqueue(current_stream(), [=] { std::memcpy(to, from, nbytes); });
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> lock(mutex_);
    release();
  }
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(offset(memory.get()));
    if (found != blocks_.end() && found->second.stream != stream.id()) {
      found->second.others.insert(stream.id());
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : {&stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.allocation}) {
      (*stat)[0].reset_peak();
    }
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t reserved = stats_.reserved_bytes[0].current;
    return {settings.limit - std::min<size_t>(settings.limit, reserved), settings.limit};
  }

 private:
  using Blocks = std::map<size_t, Block>; // by offset

  static size_t offset(const void* address) {
    return static_cast<const char*>(address) - space().shown;
  }

  static void give_back(void* address);

  void* take(size_t nbytes) {
    size_t whole = (nbytes + ROUND - 1) / ROUND * ROUND;
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = cached(whole);
    if (found == blocks_.end()) {
      found = segment(whole);
    }
    if (found == blocks_.end()) {
      release();
      found = segment(whole);
    }
    if (found == blocks_.end()) {
      ++stats_.num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "the backend for tests has no ", nbytes, " bytes left of ",
          settings.limit.load(), ", of which ", stats_.allocated_bytes[0].current, " are in use");
    }
    split(found, whole);
    found->second.free = false;
    stats_.allocation[0].increase(1);
    stats_.allocated_bytes[0].increase(whole);
    return space().shown + found->first;
  }

  Blocks::iterator cached(size_t nbytes) {
    auto best = blocks_.end();
    for (auto one = blocks_.begin(); one != blocks_.end(); ++one) {
      const Block& block = one->second;
      if (block.free && block.stream == current && block.nbytes >= nbytes &&
          (best == blocks_.end() || block.nbytes < best->second.nbytes)) {
        best = one;
      }
    }
    return best;
  }

  // Take memory from the device: the first gap that is large enough.
  Blocks::iterator segment(size_t nbytes) {
    size_t room = settings.limit - std::min<size_t>(settings.limit, stats_.reserved_bytes[0].current);
    size_t whole = std::max(nbytes, std::min(SEGMENT, room / ROUND * ROUND));
    if (whole > room) {
      return blocks_.end();
    }
    size_t begin = 0;
    for (const auto& [start, block] : blocks_) {
      if (start - begin >= whole) {
        break;
      }
      begin = start + block.nbytes;
    }
    if (begin + whole > SPACE) {
      return blocks_.end();
    }
    poison(begin, whole, current);
    stats_.reserved_bytes[0].increase(whole);
    return blocks_.emplace(begin, Block{begin, whole, current, true, {}}).first;
  }

  void split(Blocks::iterator one, size_t nbytes) {
    Block& block = one->second;
    if (block.nbytes > nbytes) {
      blocks_.emplace(
          one->first + nbytes,
          Block{block.segment, block.nbytes - nbytes, block.stream, true, {}});
      block.nbytes = nbytes;
    }
  }

  void poison(size_t begin, size_t nbytes, c10::StreamId stream) {
    char* bytes = space().bytes + begin;
    worker(stream).enqueue([=] { std::memset(bytes, POISON, nbytes); });
  }

  void freed(size_t begin) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto one = blocks_.find(begin);
    TORCH_INTERNAL_ASSERT(one != blocks_.end() && !one->second.free);
    Block& block = one->second;
    for (c10::StreamId other : block.others) {
      auto point = worker(other).mark();
      worker(block.stream).enqueue([point] { point->wait(); });
    }
    block.others.clear();
    if (block.stream == current) { // else its stream may not follow this one yet
      poison(begin, block.nbytes, current);
    }
    stats_.allocated_bytes[0].decrease(block.nbytes);
    stats_.allocation[0].decrease(1);
    block.free = true;
    join(std::next(one));
    join(one);
  }

  // Join a free block with the one before it.
  void join(Blocks::iterator one) {
    if (one == blocks_.end() || one == blocks_.begin()) {
      return;
    }
    auto before = std::prev(one);
    if (before->second.free && one->second.free && before->second.segment == one->second.segment) {
      before->second.nbytes += one->second.nbytes;
      blocks_.erase(one);
    }
  }

  // Give segments back that are free as a whole, once all work is done.
  void release() {
    wait_for_all();
    for (auto one = blocks_.begin(); one != blocks_.end();) {
      auto next = std::next(one);
      bool whole = one->second.free && one->first == one->second.segment &&
          (next == blocks_.end() || next->second.segment != one->second.segment);
      if (whole) {
        madvise(space().bytes + one->first, one->second.nbytes, MADV_DONTNEED);
        stats_.reserved_bytes[0].decrease(one->second.nbytes);
        blocks_.erase(one);
      }
      one = next;
    }
  }

  std::mutex mutex_;
  Blocks blocks_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

CachingAllocator& caching() {
  static auto* made = new CachingAllocator;
  return *made;
}

void CachingAllocator::give_back(void* address) {
  if (address && getpid() == process) {
    caching().freed(offset(address));
  }
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const {
  caching().recordStream(memory, stream);
}

// Pinned host memory stays until all copies are done, as torch's own allocators see to.

struct PinnedAllocator final : c10::Allocator {
  std::mutex mutex;
  std::map<char*, size_t> ranges;

  c10::DataPtr allocate(size_t nbytes) override {
    char* address = mapped(std::max<size_t>(nbytes, 1), PROT_READ | PROT_WRITE);
    std::lock_guard<std::mutex> lock(mutex);
    ranges[address] = std::max<size_t>(nbytes, 1);
    return {address, address, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }
  static void give_back(void* address);
};

PinnedAllocator& pinned() {
  static auto* made = new PinnedAllocator;
  return *made;
}

void PinnedAllocator::give_back(void* address) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto found = pinned().ranges.find(static_cast<char*>(address));
  if (found != pinned().ranges.end()) {
    if (getpid() == process) {
      wait_for_all();
      munmap(address, found->second);
    }
    pinned().ranges.erase(found);
  }
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize(storage.unsafeGetStorageImpl(), nbytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(TYPE, &caching());
  return true;
}();

} // namespace

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto* wanted = const_cast<char*>(static_cast<const char*>(address));
  auto after = pinned().ranges.upper_bound(wanted);
  return after != pinned().ranges.begin() &&
      wanted < std::prev(after)->first + std::prev(after)->second;
}

void resize(c10::StorageImpl* storage, size_t nbytes) {
  c10::DataPtr memory = caching().allocate(nbytes);
  size_t kept = std::min<size_t>(nbytes, storage->nbytes());
  if (kept) {
    caching().copy_data(memory.get(), storage->data(), kept);
  }
  storage->set_data_ptr(std::move(memory));
  storage->set_nbytes(nbytes);
}

c10::Allocator* allocator() {
  return &caching();
}

} // namespace backend

// What tests set and read, by ctypes.
extern "C" {

void backend_set(uint64_t seed, int delay_us, size_t limit) {
  backend::settings.seed = seed;
  backend::settings.delay_us = delay_us;
  backend::settings.limit = limit ? limit : backend::SPACE;
  ++backend::settings.round;
}

int64_t backend_kernels() {
  return backend::settings.kernels;
}
}
