#include "channels.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <thread>
#include <tuple>

namespace emulated {
namespace {

constexpr auto longest_join = std::chrono::minutes(2);

struct Header {  // in front of each message
  uint32_t operation, unused;
  uint64_t size;
};

void back_off(int& attempts) {
  if (++attempts < 50) std::this_thread::yield();
  else std::this_thread::sleep_for(std::chrono::microseconds(std::min(attempts, 500)));
}

}  // namespace

size_t Channel::push(const char* from, size_t size) {
  const uint64_t position = written;
  size = std::min(size, free());
  const size_t first = std::min(size, channel_bytes - position % channel_bytes);
  std::memcpy(data + position % channel_bytes, from, first);
  std::memcpy(data, from + first, size - first);
  written = position + size;
  return size;
}
size_t Channel::pull(char* to, size_t size) {
  const uint64_t position = read;
  size = std::min(size, filled());
  const size_t first = std::min(size, channel_bytes - position % channel_bytes);
  std::memcpy(to, data + position % channel_bytes, first);
  std::memcpy(to + first, data, size - first);
  read = position + size;
  return size;
}

Communicator* Communicator::join(const std::string& name, int ranks, int rank) {
  const size_t channels = sizeof(Channel) * static_cast<size_t>(ranks * ranks), size = 4096 + channels;
  const int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) return nullptr;
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return nullptr;
  auto* joined = static_cast<std::atomic<int>*>(memory);
  ++*joined;
  const auto begin = std::chrono::steady_clock::now();
  for (int attempts = 0; *joined < ranks; back_off(attempts))
    if (std::chrono::steady_clock::now() - begin > longest_join) return nullptr;
  shm_unlink(name.c_str());  // the memory stays until all processes have ended
  return new Communicator(ranks, rank, reinterpret_cast<Channel*>(static_cast<char*>(memory) + 4096));
}

void Communicator::wait_for_turn(uint64_t ticket) {
  for (int attempts = 0; serving_ != ticket && !aborted; back_off(attempts)) {
  }
}

bool Transfer::advance() {
  Channel& channel = sends ? communicator->to(peer) : communicator->from(peer);
  bool moved_any = false;
  if (!announced) {
    Header header{operation, 0, size};
    auto* bytes = reinterpret_cast<char*>(&header);
    if (sends ? channel.free() < sizeof header : channel.filled() < sizeof header) return false;
    if (sends) channel.push(bytes, sizeof header);
    else channel.pull(bytes, sizeof header);
    if (header.operation != operation || header.size != size) {
      std::fprintf(stderr,
                   "emulated NCCL: rank %d waits for %llu bytes of operation %u from rank %d, which sends %llu bytes "
                   "of operation %u\n",
                   communicator->rank, static_cast<unsigned long long>(size), operation, peer,
                   static_cast<unsigned long long>(header.size), header.operation);
      std::abort();
    }
    announced = moved_any = true;
  }
  const uint64_t now = sends ? channel.push(data + moved, size - moved) : channel.pull(data + moved, size - moved);
  moved += now;
  return moved_any || now != 0;
}

void run_transfers(std::vector<Transfer>& transfers) {
  int attempts = 0;
  for (;;) {
    bool all_done = true, moved = false;
    std::set<std::tuple<Communicator*, int, bool>> busy;
    for (Transfer& transfer : transfers) {
      if (transfer.done()) continue;
      if (transfer.communicator->aborted) return;
      all_done = false;
      if (busy.emplace(transfer.communicator, transfer.peer, transfer.sends).second) moved |= transfer.advance();
    }
    if (all_done) return;
    if (moved) attempts = 0;
    else back_off(attempts);
  }
}

bool mirror(const std::vector<Transfer>& transfers) {
  using Messages = std::tuple<Communicator*, uint32_t, int>;
  std::map<Messages, std::deque<const Transfer*>> sent;
  for (const Transfer& t : transfers)
    if (t.sends) sent[{t.communicator, t.operation, t.peer}].push_back(&t);
  for (const Transfer& t : transfers) {
    if (t.sends) continue;
    const void* from = t.alike;
    if (from == nullptr) {
      const Communicator* c = t.communicator;
      auto& messages = sent[{t.communicator, t.operation, (2 * c->rank - t.peer + c->ranks) % c->ranks}];
      if (messages.empty() || messages.front()->size != t.size) return false;
      from = messages.front()->data;
      messages.pop_front();
    }
    if (t.data != nullptr) std::memmove(t.data, from, t.size);
  }
  return true;
}

}  // namespace emulated
