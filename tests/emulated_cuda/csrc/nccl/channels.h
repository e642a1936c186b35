// Messages between the processes of one machine, through shared memory.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emulated {

constexpr size_t channel_bytes = size_t{1} << 18;

/// Bytes from one process to another, in order.
struct Channel {
  std::atomic<uint64_t> written, read;
  char data[channel_bytes];

  size_t push(const char* from, size_t size);
  size_t pull(char* to, size_t size);
  size_t free() const { return channel_bytes - (written - read); }
  size_t filled() const { return written - read; }
};

/// A communicator of NCCL: one process's end of the channels between all pairs of its ranks.
class Communicator {
 public:
  /// Joins the ranks that give the same name; null if they do not all come within two minutes.
  static Communicator* join(const std::string& name, int ranks, int rank);
  /// One rank of several that are not there, for `mirror`.
  static Communicator* alone(int ranks, int rank) { return new Communicator(ranks, rank, nullptr); }

  const int ranks, rank;
  std::atomic<bool> aborted{false};
  Channel& to(int peer) { return channels_[static_cast<size_t>(rank * ranks + peer)]; }
  Channel& from(int peer) { return channels_[static_cast<size_t>(peer * ranks + rank)]; }

  /// Operations run in the order in which the host starts them, whatever their streams are.
  uint64_t take_ticket() { return next_++; }
  void wait_for_turn(uint64_t ticket);
  void end_turn() { ++serving_; }

 private:
  Communicator(int ranks, int rank, Channel* channels) : ranks(ranks), rank(rank), channels_(channels) {}
  Channel* channels_;
  std::atomic<uint64_t> next_{0}, serving_{0};
};

/// One message to or from a peer.
struct Transfer {
  Communicator* communicator;
  int peer;
  bool sends;
  char* data;
  uint64_t size;
  uint32_t operation;  // both sides must give the same
  const void* alike = nullptr;  // of a receive: what the peer would send if it were like this rank; null for a message
  uint64_t moved = 0;
  bool announced = false;

  bool done() const { return announced && moved == size; }
  /// Moves what can be moved now; whether that was anything.
  bool advance();
};

/// Moves all transfers to their end. Those of the same peer and direction run in order.
void run_transfers(std::vector<Transfer>& transfers);

/// The same where the peers are not there, and do what this rank does: it receives a message as it sends one to the peer that is as
/// far away on its other side. Transfers without `data` move nothing. False if a message is received that is not sent in this way.
bool mirror(const std::vector<Transfer>& transfers);

}  // namespace emulated
