// NCCL for processes of one machine. Every collective is made of messages between pairs of ranks. In simulated time, this process
// is one rank of several that all do the same.
#include <sys/random.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>

#include "../emulated_cuda.h"
#include "channels.h"
#include "reductions.h"

using namespace emulated;

namespace {

constexpr int ok = 0, system_error = 2, invalid_argument = 4, invalid_usage = 5;
constexpr int first_own_reduction = 16;

enum Code : uint32_t { all_reduce_code, reduce_code, broadcast_code, all_gather_code, reduce_scatter_code, all_to_all_code, message_code, split_code };

/// Whether values are moved: in simulated time, as many bytes as operators compute (costs.cpp).
bool has_values(size_t size, int type) {
  constexpr size_t largest_float = size_t{256} << 10, largest_integer = size_t{32} << 20;
  return !emulated_cuda_simulates() || size <= (is_integer(type) ? largest_integer : largest_float);
}

/// One operation of a rank: its messages, then what it does with what came.
struct Operation {
  Communicator* communicator;
  void* stream;
  bool moves;
  std::vector<Transfer> transfers;
  std::vector<std::unique_ptr<char[]>> buffers;
  std::function<void()> finish;
  double sent = 0, received = 0;  // by the links of this rank's device

  /// `size` is that of a part, all of which are moved or none.
  Operation(void* c, void* stream, size_t size, int type)
      : communicator(static_cast<Communicator*>(c)), stream(stream), moves(has_values(size, type)) {}
  void send(int peer, const void* data, size_t size, Code code) {
    if (peer != communicator->rank) sent += static_cast<double>(size);
    transfers.push_back({communicator, peer, true, static_cast<char*>(const_cast<void*>(data)), size, code});
  }
  /// `alike`: what the peer would send if it were like this rank.
  void receive(int peer, void* data, size_t size, Code code, const void* alike) {
    if (peer != communicator->rank) received += static_cast<double>(size);
    transfers.push_back({communicator, peer, false, moves ? static_cast<char*>(data) : nullptr, size, code, alike});
  }
  /// Receives into a buffer of the operation's own.
  char* receive(int peer, size_t size, Code code, const void* alike) {
    buffers.emplace_back(moves ? new char[size] : nullptr);
    receive(peer, buffers.back().get(), size, code, alike);
    return buffers.back().get();
  }
  /// Sets what the links move by the algorithms of NCCL, where that is less than these messages.
  void set_bytes(double bytes) { sent = received = bytes; }
};
/// The operations of a group, which run as one.
struct Group {
  std::vector<std::shared_ptr<Operation>> operations;
  std::map<Communicator*, uint64_t> tickets;
};

std::vector<Transfer> transfers_of(const Group& group) {
  std::vector<Transfer> transfers;
  for (const auto& operation : group.operations)
    transfers.insert(transfers.end(), operation->transfers.begin(), operation->transfers.end());
  return transfers;
}

void run(const Group& group) {
  if (!emulated_cuda_simulates()) {  // else `mirror` has moved what came
    std::vector<Transfer> transfers = transfers_of(group);
    for (auto [communicator, ticket] : group.tickets) communicator->wait_for_turn(ticket);
    run_transfers(transfers);
    for (auto [communicator, _] : group.tickets) communicator->end_turn();
  }
  for (const auto& operation : group.operations)
    if (operation->finish && operation->moves && !operation->communicator->aborted) operation->finish();
}

EmulatedCost cost_of(const Group& group) {
  double sent = 0, received = 0;
  for (const auto& operation : group.operations) sent += operation->sent, received += operation->received;
  if (sent + received == 0) return {};
  return {emulated_network, 0, std::max(sent, received)};
}

thread_local int group_depth = 0;
thread_local const char* last_error = "";
thread_local Group group;

int start_group() {
  auto* argument = new Group(std::move(group));
  group = Group();
  void* const stream = argument->operations.front()->stream;
  for (const auto& each : argument->operations) {
    if (each->stream != stream) return emulated_cuda_missing("a group of NCCL calls on several streams"), invalid_usage;
    if (argument->tickets.count(each->communicator) == 0)
      argument->tickets[each->communicator] = each->communicator->take_ticket();
  }
  if (emulated_cuda_simulates() && !mirror(transfers_of(*argument))) {
    last_error = "a rehearsed rank receives a message that it does not send on: all ranks have to do the same, which excludes "
                 "pipelines, gather and scatter";
    return invalid_usage;
  }
  const EmulatedCost cost = cost_of(*argument);
  emulated_cuda_launch(
      stream,
      [](void* given) {
        std::unique_ptr<Group> own(static_cast<Group*>(given));
        run(*own);
      },
      argument, "nccl", cost);
  return ok;
}
int start(std::shared_ptr<Operation> operation) {
  group.operations.push_back(std::move(operation));
  return group_depth > 0 ? ok : start_group();
}

std::mutex reductions_mutex;
std::map<int, double> own_reductions;  // factors of sums, by number

/// The reduction and the factor that a number means.
std::pair<int, double> reduction_of(int number) {
  std::lock_guard<std::mutex> lock(reductions_mutex);
  const auto found = own_reductions.find(number);
  return found == own_reductions.end() ? std::pair<int, double>{number, 1.0} : std::pair<int, double>{sum, found->second};
}

/// Reduces the ranks' contributions to the part `[first, first + count)` into `out`.
int reduce_part(std::shared_ptr<Operation> operation, const char* own, std::vector<char*> of_others, void* out, size_t count,
                int type, int number) {
  const auto [reduction, factor] = reduction_of(number);
  Operation* raw = operation.get();
  raw->finish = [=, this_rank = raw->communicator->rank] {
    std::vector<const char*> contributions(of_others.begin(), of_others.end());
    contributions.insert(contributions.begin() + this_rank, own);
    if (!reduce(contributions, static_cast<char*>(out), count, type, reduction, factor))
      std::fprintf(stderr, "emulated NCCL: values of type %d cannot be reduced\n", type), std::abort();
  };
  return start(std::move(operation));
}

template <class F>
void for_others(const Communicator* c, F f) {
  for (int peer = 0; peer < c->ranks; ++peer)
    if (peer != c->rank) f(peer);
}

struct UniqueId {
  char bytes[128];
};

std::string name_of(uint64_t number) {
  char name[64];
  std::snprintf(name, sizeof name, "/emulated_nccl_%016llx", static_cast<unsigned long long>(number));
  return name;
}
uint64_t random_number() {
  uint64_t number = 0;
  return getrandom(&number, sizeof number, 0) == sizeof number ? number : 0;
}
int join(void** communicator, const UniqueId& id, int ranks, int rank) {
  if (emulated_cuda_simulates() && ranks > emulated_cuda_ranks()) {
    last_error = "simulated time has one process: rehearse one rank of several by benchmarks/rehearse.py --ranks";
    return invalid_usage;
  }
  uint64_t number;
  std::memcpy(&number, id.bytes, sizeof number);
  *communicator = emulated_cuda_simulates() ? Communicator::alone(ranks, rank) : Communicator::join(name_of(number), ranks, rank);
  return *communicator == nullptr ? system_error : ok;
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) { return *version = 22907, ok; }
const char* ncclGetErrorString(int) { return "an error of the emulated NCCL"; }
const char* ncclGetLastError(void*) { return last_error; }

int ncclGetUniqueId(UniqueId* id) {
  std::memset(id, 0, sizeof *id);
  const uint64_t number = random_number();
  std::memcpy(id->bytes, &number, sizeof number);
  return ok;
}
int ncclCommInitRank(void** c, int ranks, UniqueId id, int rank) { return join(c, id, ranks, rank); }
int ncclCommInitRankConfig(void** c, int ranks, UniqueId id, int rank, void*) { return join(c, id, ranks, rank); }
int ncclCommInitRankScalable(void** c, int ranks, int rank, int, UniqueId* ids, void*) { return join(c, ids[0], ranks, rank); }

int ncclCommSplit(void* communicator, int color, int key, void** made, void*) {
  struct Member {
    int color, key, rank;
    uint64_t number;
  };
  if (emulated_cuda_simulates()) return emulated_cuda_missing("splitting a communicator in simulated time"), system_error;
  auto* c = static_cast<Communicator*>(communicator);
  Operation operation(c, nullptr, sizeof(Member), 1);
  std::vector<Member> members(static_cast<size_t>(c->ranks));
  Member& own = members[static_cast<size_t>(c->rank)] = {color, key, c->rank, random_number()};
  for_others(c, [&](int peer) {
    operation.send(peer, &own, sizeof own, split_code);
    operation.receive(peer, &members[static_cast<size_t>(peer)], sizeof own, split_code, &own);
  });
  c->wait_for_turn(c->take_ticket());
  run_transfers(operation.transfers);
  c->end_turn();
  *made = nullptr;
  if (color < 0) return ok;
  std::erase_if(members, [=](const Member& m) { return m.color != color; });
  std::stable_sort(members.begin(), members.end(), [](const Member& a, const Member& b) { return a.key < b.key; });
  const auto mine = std::find_if(members.begin(), members.end(), [=](const Member& m) { return m.rank == c->rank; });
  *made = Communicator::join(name_of(members[0].number), static_cast<int>(members.size()),
                             static_cast<int>(mine - members.begin()));
  return *made == nullptr ? system_error : ok;
}
int ncclCommDestroy(void*) { return ok; }  // operations may still run; the memory goes with the process
int ncclCommAbort(void* c) { return static_cast<Communicator*>(c)->aborted = true, ok; }
int ncclCommFinalize(void*) { return ok; }
int ncclCommGetAsyncError(void*, int* error) { return *error = ok, ok; }
int ncclCommCount(void* c, int* count) { return *count = static_cast<Communicator*>(c)->ranks, ok; }
int ncclCommUserRank(void* c, int* rank) { return *rank = static_cast<Communicator*>(c)->rank, ok; }
int ncclCommRegister(void*, void*, size_t, void** handle) { return *handle = nullptr, ok; }
int ncclCommDeregister(void*, void*) { return ok; }
int ncclCommDump(void*, void*) { return ok; }

int ncclGroupStart() { return ++group_depth, ok; }
int ncclGroupEnd() {
  return --group_depth > 0 || group.operations.empty() ? ok : start_group();
}

int ncclRedOpCreatePreMulSum(int* number, void* scalar, int type, int, void*) {
  double factor;
  if (type == 8) factor = *static_cast<double*>(scalar);
  else if (type == 7) factor = *static_cast<float*>(scalar);
  else if (type == 6) factor = static_cast<double>(*static_cast<_Float16*>(scalar));
  else if (type == 9) {
    const uint32_t raw = static_cast<uint32_t>(*static_cast<uint16_t*>(scalar)) << 16;
    float value;
    std::memcpy(&value, &raw, sizeof value);
    factor = value;
  } else return invalid_argument;
  std::lock_guard<std::mutex> lock(reductions_mutex);
  *number = first_own_reduction + static_cast<int>(own_reductions.size());
  own_reductions[*number] = factor;
  return ok;
}
int ncclRedOpDestroy(int, void*) { return ok; }  // operations that run later may still need it

// ---- collectives

int ncclAllReduce(const void* from, void* to, size_t count, int type, int reduction, void* communicator, void* stream) {
  auto* c = static_cast<Communicator*>(communicator);
  const size_t size = count * value_bytes(type);
  auto operation = std::make_shared<Operation>(c, stream, size, type);
  std::vector<char*> of_others;
  for_others(c, [&](int peer) {
    operation->send(peer, from, size, all_reduce_code);
    of_others.push_back(operation->receive(peer, size, all_reduce_code, from));
  });
  operation->set_bytes(2.0 * static_cast<double>(size) * (c->ranks - 1) / c->ranks);
  return reduce_part(std::move(operation), static_cast<const char*>(from), of_others, to, count, type, reduction);
}
int ncclReduce(const void* from, void* to, size_t count, int type, int reduction, int root, void* communicator, void* stream) {
  auto* c = static_cast<Communicator*>(communicator);
  const size_t size = count * value_bytes(type);
  auto operation = std::make_shared<Operation>(c, stream, size, type);
  if (c->rank != root) {
    operation->send(root, from, size, reduce_code);
    return start(std::move(operation));
  }
  std::vector<char*> of_others;
  for_others(c, [&](int peer) { of_others.push_back(operation->receive(peer, size, reduce_code, from)); });
  operation->set_bytes(static_cast<double>(size));
  return reduce_part(std::move(operation), static_cast<const char*>(from), of_others, to, count, type, reduction);
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int reduction, void* communicator, void* stream) {
  auto* c = static_cast<Communicator*>(communicator);
  const size_t size = count * value_bytes(type);
  auto operation = std::make_shared<Operation>(c, stream, size, type);
  const auto part = [=](int rank) { return static_cast<const char*>(from) + static_cast<size_t>(rank) * size; };
  std::vector<char*> of_others;
  for_others(c, [&](int peer) {
    operation->send(peer, part(peer), size, reduce_scatter_code);
    of_others.push_back(operation->receive(peer, size, reduce_scatter_code, part(c->rank)));
  });
  return reduce_part(std::move(operation), part(c->rank), of_others, to, count, type, reduction);
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, void* communicator, void* stream) {
  auto* c = static_cast<Communicator*>(communicator);
  const size_t size = count * value_bytes(type);
  auto operation = std::make_shared<Operation>(c, stream, size, type);
  if (c->rank != root) operation->receive(root, to, size, broadcast_code, from);
  else for_others(c, [&](int peer) { operation->send(peer, from, size, broadcast_code); });
  if (c->rank == root) operation->finish = [=] { std::memmove(to, from, size); };
  operation->set_bytes(static_cast<double>(size));
  return start(std::move(operation));
}
int ncclBcast(void* data, size_t count, int type, int root, void* communicator, void* stream) {
  return ncclBroadcast(data, data, count, type, root, communicator, stream);
}
int ncclAllGather(const void* from, void* to, size_t count, int type, void* communicator, void* stream) {
  auto* c = static_cast<Communicator*>(communicator);
  const size_t size = count * value_bytes(type);
  auto operation = std::make_shared<Operation>(c, stream, size, type);
  const auto part = [=](int rank) { return static_cast<char*>(to) + static_cast<size_t>(rank) * size; };
  for_others(c, [&](int peer) {
    operation->send(peer, from, size, all_gather_code);
    operation->receive(peer, part(peer), size, all_gather_code, from);
  });
  operation->finish = [=] { std::memmove(part(c->rank), from, size); };
  return start(std::move(operation));
}
int ncclAlltoAll(const void* from, void* to, size_t count, int type, void* communicator, void* stream) {
  auto* c = static_cast<Communicator*>(communicator);
  const size_t size = count * value_bytes(type);
  auto operation = std::make_shared<Operation>(c, stream, size, type);
  for (int peer = 0; peer < c->ranks; ++peer) {
    operation->send(peer, static_cast<const char*>(from) + static_cast<size_t>(peer) * size, size, all_to_all_code);
    operation->receive(peer, static_cast<char*>(to) + static_cast<size_t>(peer) * size, size, all_to_all_code, nullptr);
  }
  return start(std::move(operation));
}
int ncclSend(const void* from, size_t count, int type, int peer, void* communicator, void* stream) {
  const size_t size = count * value_bytes(type);
  auto operation = std::make_shared<Operation>(communicator, stream, size, type);
  operation->send(peer, from, size, message_code);
  return start(std::move(operation));
}
int ncclRecv(void* to, size_t count, int type, int peer, void* communicator, void* stream) {
  const size_t size = count * value_bytes(type);
  auto operation = std::make_shared<Operation>(communicator, stream, size, type);
  operation->receive(peer, to, size, message_code, nullptr);
  return start(std::move(operation));
}
}
