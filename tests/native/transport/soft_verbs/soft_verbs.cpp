// A software libibverbs: the symbols and structures of the real one, reliable connections that read and write
// memory of this process and, over a file that both map, of others. Tests only.
//
// All of it is under kLocks locks, which processes share. A call takes all of them, but for requests that go
// well, and polls, of a script without faults: those take the one of their completion queue, so that threads
// with queues of their own do not meet. A registration ends under all locks: no byte lands behind it, as
// behind a real NIC's. Queue pairs and keys are rows of the shared table; completion queues and requests
// under way are the process's own.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/tsan.hpp"
#include "controls.hpp"
#include "transport/rdma/abi.hpp"

// Declared before their definitions, for the compiler's sake.
extern "C" {
#define MOONPOOL_DECLARE(result, name, arguments) result name arguments;
MOONPOOL_SOFT_VERBS_CONTROLS(MOONPOOL_DECLARE)
#undef MOONPOOL_DECLARE
}

namespace {

using namespace moonpool::transport::rdma::ib;
using moonpool::OrderedByThePeer;

constexpr int kDevicesMax = 10;
constexpr int kReset = 0;
constexpr size_t kLocks = 8;
constexpr uint64_t kLookNs = 2'000'000;  // a virtual clock goes on while something lost is waited for

struct PairRow {
    bool used;
    pid_t pid;
    uint32_t number, dest;
    int state, device;
    int mtu;  // of its path, as in the ABI
    Gid peer;
    uint16_t peer_lid;
};
struct KeyRow {
    bool used;
    pid_t pid;
    uint32_t key;
    int access;
    uint64_t address, length;
    uint64_t at;  // where its process has the bytes
};
struct alignas(128) SharedLock {
    pthread_mutex_t mutex;
};
// What all processes share. One lock is enough to read it.
struct Shared {
    SharedLock locks[kLocks];
    int ready;
    uint32_t next_pair, next_key;
    bool down[kDevicesMax], silent[kDevicesMax];
    PairRow pairs[4096];
    KeyRow keys[32768];
};

struct Script {
    int devices = 2, pairs = 2048;
    bool no_kernel = false, infiniband = false, efa = false, is_virtual = false, relaxed = false,
         no_dma_buf = false;
    std::string gids = "v4";
    int mtu[kDevicesMax];
    uint64_t speed[kDevicesMax] = {};
    std::map<uint64_t, int> fail;
    std::set<uint64_t> lost, late, full, no_memory, twice, swapped;
    std::map<uint64_t, uint64_t> held;
    std::string gone[kDevicesMax];
    uint64_t no_memory_from = UINT64_MAX;

    // No request fails, waits or is counted by it.
    bool is_plain() const {
        bool no_speed = std::ranges::all_of(speed, [](uint64_t each) { return each == 0; });
        return !is_virtual && !relaxed && no_speed && fail.empty() && lost.empty() && late.empty() &&
               full.empty() && twice.empty() && swapped.empty() && held.empty();
    }
};

// A registration, with what was mapped for it.
struct SoftMr : Mr {
    void* mapped = nullptr;
    size_t mapped_bytes = 0;
};
// Memory of a card, and where the CPU sees it.
struct PeerMemory {
    uint64_t address, bytes;
    char* seen;
};
struct SoftDevice {
    char name[16];
    int index;
};
struct SoftChannel : Channel {};
struct SoftCq : Cq {
    size_t lock = 0;  // of kLocks, for what is in here
    std::deque<Wc> done;
    bool armed = false;
    uint64_t armed_at = 0;  // as State::acts counts
    int pairs = 0;
};
struct SoftContext : Context {
    std::deque<AsyncEvent> events;
    int index = 0;
    int objects = 0;
};
// Bytes of a write that have left the sender.
struct InWire {
    uint32_t pair, dest;
    uint32_t key;
    uint64_t address;
    std::vector<char> bytes;
};
// A completion that is told of later.
struct Told {
    SoftCq* cq;
    Wc wc;
    uint64_t at;  // held: when that request is posted
};
struct SoftQp : Qp {
    PairRow* row = nullptr;
    bool all_signaled = false;
    bool lost = false;  // nothing of it completes any more
    uint32_t open = 0, requests_max = 0;
};
struct Request {
    uint64_t due_ns;
    uint32_t pair;
    SendWr wr;
    Sge sge;
    std::vector<char> inlined;
    uint64_t ordinal;
};

// Of what was done under one lock alone; events of all.
struct alignas(128) Counts {
    uint64_t requests = 0, posts = 0, events = 0, signaled = 0, inlined = 0;
    uint64_t bytes[kDevicesMax] = {};
};

struct State {
    Shared* shared = nullptr;
    pid_t pid = ::getpid();  // a system call each time
    Script script;
    bool plain = true;  // Script::is_plain()
    size_t next_lock = 0;
    Counts counts[kLocks];  // of each lock
    SoftDevice devices[kDevicesMax];
    std::vector<SoftContext*> contexts;
    std::map<uint32_t, SoftQp*> pairs;  // of this process
    std::vector<InWire> wire;
    std::vector<Told> held, swapped;
    std::vector<PeerMemory> peermem;
    std::deque<Request> under_way[kDevicesMax];
    uint64_t busy_until[kDevicesMax] = {};
    uint64_t virtual_ns = 1, idle_polls = 0;
    uint64_t bytes[kDevicesMax] = {};  // posted
    uint64_t requests = 0, posts = 0, signaled = 0, inlined = 0, registrations = 0, objects = 0,
             violations = 0, landed_late = 0, dropped_late = 0, told_late = 0;
    std::set<SoftCq*> cqs;  // that tell of their completions
    // Calls that post, take completions or arm a queue; the last of the first two.
    uint64_t acts = 0, last_work = 0;
    uint64_t armed_ns = 0;  // the last time
    bool thread = false;
};
State* state_now = nullptr;

uint64_t clock_ns(const State& s) {
    if (s.script.is_virtual) return s.virtual_ns;
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

void read_script(State& s, const char* text) {
    s.script = Script{};
    for (int& mtu : s.script.mtu) mtu = 5;
    std::fill_n(s.shared->down, kDevicesMax, false);
    std::fill_n(s.shared->silent, kDevicesMax, false);
    s.requests = s.posts = s.signaled = s.inlined = 0;
    s.registrations = s.landed_late = s.dropped_late = s.told_late = 0;
    s.peermem.clear();
    for (Counts& counts : s.counts) counts.requests = counts.posts = counts.signaled = counts.inlined = 0;
    s.wire.clear();
    s.held.clear();
    s.swapped.clear();
    std::fill_n(s.busy_until, kDevicesMax, 0);
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        std::string name = word.substr(0, word.find('='));
        std::string value = word.find('=') == std::string::npos ? "" : word.substr(word.find('=') + 1);
        uint64_t number = std::strtoull(value.c_str(), nullptr, 10);
        size_t device = static_cast<size_t>(name.back() - '0') % kDevicesMax;
        if (name == "devices")
            s.script.no_kernel = value == "none", s.script.devices = static_cast<int>(number);
        if (name == "pairs") s.script.pairs = static_cast<int>(number);
        if (name == "ib") s.script.infiniband = true;
        if (name == "efa") s.script.efa = true;
        if (name == "virtual") s.script.is_virtual = true;
        if (name == "relaxed") s.script.relaxed = true;
        if (name == "nodmabuf") s.script.no_dma_buf = true;
        if (name == "gids") s.script.gids = value;
        if (name.starts_with("mtu")) s.script.mtu[device] = static_cast<int>(number);
        if (name.starts_with("down")) s.shared->down[device] = true;
        if (name.starts_with("speed")) s.script.speed[device] = number;
        if (name == "fail") s.script.fail[number] = std::atoi(value.substr(value.find(':') + 1).c_str());
        if (name == "held") {
            s.script.held[number] = std::strtoull(value.c_str() + value.find(':') + 1, nullptr, 10);
        }
        if (name == "twice") s.script.twice.insert(number);
        if (name == "swapped") s.script.swapped.insert(number);
        if (name.starts_with("gone")) s.script.gone[device] = value.empty() ? "all" : value;
        if (name == "lost") s.script.lost.insert(number);
        if (name == "late") s.script.late.insert(number);
        if (name == "full") s.script.full.insert(number);
        if (name == "nomem") s.script.no_memory.insert(number);
        if (name == "nomem" && value.back() == '+') s.script.no_memory_from = number;
    }
    s.plain = s.script.is_plain();
}

State& state() {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, [] {
        auto* made = new State;
        const char* path = std::getenv("MOONPOOL_SOFT_VERBS_FILE");
        int fd = path != nullptr ? ::open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600)
                                 : ::memfd_create("soft_verbs", MFD_CLOEXEC);
        if (fd < 0 || ::ftruncate(fd, sizeof(Shared)) != 0) std::abort();
        if (path == nullptr) {  // programs that this one starts are on the same wire
            std::string mine = "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(fd);
            ::setenv("MOONPOOL_SOFT_VERBS_FILE", mine.c_str(), 1);
        }
        void* at = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (at == MAP_FAILED) std::abort();
        made->shared = static_cast<Shared*>(at);
        // The parent of a test's processes is the first here, before it starts another.
        if (made->shared->ready == 0) {
            pthread_mutexattr_t attr;
            pthread_mutexattr_init(&attr);
            pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
            pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
            for (SharedLock& lock : made->shared->locks) pthread_mutex_init(&lock.mutex, &attr);
            made->shared->next_pair = 16;
            made->shared->next_key = 1;
            made->shared->ready = 1;
        }
        const char* script = std::getenv("MOONPOOL_SOFT_VERBS");
        read_script(*made, script == nullptr ? "" : script);
        for (int i = 0; i < kDevicesMax; ++i) {
            std::snprintf(made->devices[i].name, sizeof(made->devices[i].name), "soft%d", i);
            made->devices[i].index = i;
        }
        state_now = made;
        pthread_atfork(nullptr, nullptr, [] { state_now->pid = ::getpid(); });
    });
    return *state_now;
}

// The lock of one completion queue.
class QueueLock {
   public:
    QueueLock(State& s, size_t number) : mutex_(s.shared->locks[number].mutex) {
        // Of a process that was killed: its pairs and keys stay, and no process answers behind them.
        if (pthread_mutex_lock(&mutex_) == EOWNERDEAD) pthread_mutex_consistent(&mutex_);
    }
    ~QueueLock() { pthread_mutex_unlock(&mutex_); }
    QueueLock(const QueueLock&) = delete;

   private:
    pthread_mutex_t& mutex_;
};

// All of them.
class Lock {
   public:
    explicit Lock(State& s) : Lock(s, std::make_index_sequence<kLocks>()) {}

   private:
    template <size_t... kNumbers>
    Lock(State& s, std::index_sequence<kNumbers...>) : locks_{{s, kNumbers}...} {}

    QueueLock locks_[kLocks];
};

KeyRow* find_key(State& s, uint32_t key) {
    size_t at = (key >> 8) % std::size(s.shared->keys);
    KeyRow& row = s.shared->keys[at];
    return row.used && row.key == key ? &row : nullptr;
}
PairRow* find_pair(State& s, uint32_t number) {
    PairRow& row = s.shared->pairs[number % std::size(s.shared->pairs)];
    return row.used && row.number == number ? &row : nullptr;
}
bool alive(const State& s, pid_t pid) { return pid == s.pid || ::kill(pid, 0) == 0; }

// Between this process and `pid`'s memory. Whether all of it was there.
bool copy(const State& s, pid_t pid, void* here, uint64_t there, size_t bytes, bool write) {
    auto* other = reinterpret_cast<void*>(there);
    if (pid == s.pid) {
        OrderedByThePeer scope;
        std::memmove(write ? other : here, write ? here : other, bytes);
        return true;
    }
    iovec mine{here, bytes}, theirs{other, bytes};
    ssize_t n = write ? ::process_vm_writev(pid, &mine, 1, &theirs, 1, 0)
                      : ::process_vm_readv(pid, &mine, 1, &theirs, 1, 0);
    return n == static_cast<ssize_t>(bytes);
}

void add_completion(State& s, SoftCq& cq, const Wc& wc) {
    if (cq.done.size() >= static_cast<size_t>(cq.cqe)) {
        ++s.violations;
        std::fprintf(stderr, "soft_verbs: a completion queue overran\n");
    }
    cq.done.push_back(wc);
    if (!cq.armed || cq.channel == nullptr) return;
    cq.armed = false;
    ++s.counts[cq.lock].events;
    uint64_t one = 1;
    (void)!::write(cq.channel->fd, &one, sizeof(one));
}

// ordinal: of the request; 0: of a script without faults.
void complete(State& s, SoftQp& qp, const SendWr& wr, int status, uint64_t ordinal) {
    if (status == 0 && !qp.all_signaled && (wr.send_flags & kSignaled) == 0) return;
    Wc wc{};
    wc.wr_id = wr.wr_id;
    wc.status = status;
    wc.qp_num = qp.qp_num;
    auto& cq = static_cast<SoftCq&>(*qp.send_cq);
    if (status == 0) qp.open = 0;  // in order: all before it are over, too
    if (auto held = s.script.held.find(ordinal); held != s.script.held.end()) {
        s.held.push_back({&cq, wc, held->second});
        qp.lost = true;
        return;
    }
    if (s.script.swapped.contains(ordinal)) {
        s.swapped.push_back({&cq, wc, 0});
        return;
    }
    add_completion(s, cq, wc);
    if (s.script.twice.contains(ordinal)) add_completion(s, cq, wc);
    for (const Told& told : std::exchange(s.swapped, {})) {
        if (told.wc.qp_num == wc.qp_num) {
            add_completion(s, cq, told.wc);
            ++s.told_late;
        } else {
            s.swapped.push_back(told);
        }
    }
}

// What was held until that request is posted. Its queue pair may have gone meanwhile.
void tell_held(State& s, uint64_t ordinal) {
    for (const Told& told : s.held) {
        if (told.at != ordinal) continue;
        add_completion(s, *told.cq, told.wc);
        ++s.told_late;
    }
    std::erase_if(s.held, [&](const Told& told) { return told.at == ordinal; });
}

// What a target's NIC says to bytes that arrive.
int land(State& s, uint32_t pair, uint32_t dest, uint32_t key, uint64_t address, void* bytes, size_t size,
         bool write) {
    PairRow* target = find_pair(s, dest);
    bool answers = target != nullptr && (target->state == kReadyToReceive || target->state == kReadyToSend) &&
                   target->dest == pair && alive(s, target->pid);
    if (!answers) return kRetriesOver;
    // A packet that is larger than its receiver's path allows is no packet of this connection.
    if (const PairRow* sender = find_pair(s, pair); sender != nullptr) {
        auto bytes_of = [](int mtu) { return size_t{128} << mtu; };
        const PairRow &giver = write ? *sender : *target, &taker = write ? *target : *sender;
        if (std::min(size, bytes_of(giver.mtu)) > bytes_of(taker.mtu)) return kRemoteInvalid;
    }
    KeyRow* row = find_key(s, key);
    int right = write ? kRemoteWrite : kRemoteRead;
    bool inside = row != nullptr && row->pid == target->pid && (row->access & right) != 0 &&
                  address >= row->address && size <= row->length &&
                  address - row->address <= row->length - size;
    if (!inside || !copy(s, target->pid, bytes, row->at + (address - row->address), size, write)) {
        return kRemoteAccess;
    }
    return 0;
}

bool land_late(State& s, InWire& late) {
    return land(s, late.pair, late.dest, late.key, late.address, late.bytes.data(), late.bytes.size(),
                true) == 0;
}

void flush_relaxed(State& s, uint32_t pair) {
    for (size_t i = s.wire.size(); i-- > 0;) {
        if (s.wire[i].pair != pair) continue;
        (void)land_late(s, s.wire[i]);
        s.wire.erase(s.wire.begin() + static_cast<long>(i));
    }
}

void fail_pair(State& s, SoftQp& qp, const SendWr& wr, int status, uint64_t ordinal) {
    qp.row->state = kError;
    qp.state = kError;
    complete(s, qp, wr, status, ordinal);
}

bool is_silent(State& s, const SoftQp& qp) {
    auto of = [&](int device) { return s.shared->down[device] || s.shared->silent[device]; };
    PairRow* target = find_pair(s, qp.row->dest);
    return of(qp.row->device) || (target != nullptr && of(target->device));
}

// Where the bytes of a request are that the NIC here may touch; null: it may not.
char* find_own(State& s, const Sge& sge, bool write) {
    KeyRow* own = find_key(s, sge.lkey);
    bool sound = own != nullptr && own->pid == s.pid && sge.addr >= own->address &&
                 sge.length <= own->length && sge.addr - own->address <= own->length - sge.length &&
                 (write || (own->access & kLocalWrite) != 0);
    return sound ? reinterpret_cast<char*>(own->at + (sge.addr - own->address)) : nullptr;
}

void execute(State& s, Request& request) {
    auto it = s.pairs.find(request.pair);
    if (it == s.pairs.end()) return;  // the queue pair was destroyed
    SoftQp& qp = *it->second;
    SendWr& wr = request.wr;
    if (qp.row->state == kError) return complete(s, qp, wr, kFlushed, request.ordinal);
    if (qp.lost || s.script.lost.contains(request.ordinal)) {
        qp.lost = true;
        return;
    }
    if (is_silent(s, qp)) {  // as soft RoCE: no completion at all
        qp.lost = true;
        return;
    }
    if (auto fault = s.script.fail.find(request.ordinal); fault != s.script.fail.end()) {
        return fail_pair(s, qp, wr, fault->second, request.ordinal);
    }
    const Sge& sge = request.sge;
    bool write = wr.opcode == kWrite;
    char* local = request.inlined.empty() ? find_own(s, sge, write) : request.inlined.data();
    if (local == nullptr) return fail_pair(s, qp, wr, kLocalProtection, request.ordinal);
    const bool late = s.script.late.contains(request.ordinal);
    if (write && (late || s.script.relaxed)) {
        InWire left{qp.qp_num, qp.row->dest, wr.wr.rdma.rkey, wr.wr.rdma.remote_addr, {}};
        {
            OrderedByThePeer scope;
            left.bytes.assign(local, local + sge.length);
        }
        s.wire.push_back(std::move(left));
        if (late) return fail_pair(s, qp, wr, kRetriesOver, request.ordinal);
        return complete(s, qp, wr, 0, request.ordinal);
    }
    if (!write) flush_relaxed(s, qp.qp_num);
    int status =
        land(s, qp.qp_num, qp.row->dest, wr.wr.rdma.rkey, wr.wr.rdma.remote_addr, local, sge.length, write);
    if (status != 0) return fail_pair(s, qp, wr, status, request.ordinal);
    complete(s, qp, wr, 0, request.ordinal);
}

// Executes what is due.
void run_due(State& s, uint64_t now) {
    for (auto& queue : s.under_way) {
        while (!queue.empty() && queue.front().due_ns <= now) {
            Request request = std::move(queue.front());
            queue.pop_front();
            execute(s, request);
        }
    }
}

uint64_t next_due(const State& s) {
    uint64_t next = UINT64_MAX;
    for (const auto& queue : s.under_way) {
        if (!queue.empty()) next = std::min(next, queue.front().due_ns);
    }
    return next;
}

// Time passes when no caller has anything to do.
void idle(State& s) {
    if (!s.script.is_virtual || ++s.idle_polls < 2 * s.cqs.size() + 2) return;
    s.idle_polls = 0;
    // What has completed is taken first: else its caller would find it later than it was.
    auto waits = [](const SoftCq* cq) { return cq->pairs != 0 && !cq->done.empty(); };
    if (std::ranges::any_of(s.cqs, waits)) return;
    uint64_t next = next_due(s);
    s.virtual_ns = next == UINT64_MAX ? s.virtual_ns + 100'000 : std::max(s.virtual_ns, next);
    run_due(s, s.virtual_ns);
}

// Whether all queues were armed since anything was posted or taken: then callers sleep until something
// completes.
bool asleep(const State& s) {
    return std::ranges::all_of(s.cqs, [&](const SoftCq* cq) {
        return cq->pairs == 0 || (cq->done.empty() && cq->armed && cq->armed_at > s.last_work);
    });
}

bool waits_for_lost(const State& s) {
    return std::ranges::any_of(s.pairs, [](const auto& row) { return row.second->lost; });
}

// Of callers that sleep nothing else makes time pass. Where something was lost, they look again after a
// while, and find that some time has passed; never so much that they think that they were away.
void pass_asleep(State& s) {
    if (!s.script.is_virtual || !asleep(s)) return;
    uint64_t next = next_due(s);
    if (waits_for_lost(s)) next = std::min(next, s.armed_ns + kLookNs);
    if (next == UINT64_MAX) return;
    s.virtual_ns = std::max(s.virtual_ns, next);
    s.idle_polls = 0;
}

// Of devices with a speed.
void run_nic() {
    State& s = state();
    for (;;) {
        {
            Lock lock(s);
            pass_asleep(s);
            run_due(s, clock_ns(s));
        }
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

int take(SoftCq& cq, int n, Wc* out) {
    int count = 0;
    while (count < n && !cq.done.empty()) {
        out[count++] = cq.done.front();
        cq.done.pop_front();
    }
    return count;
}

int poll_cq(Cq* raw, int n, Wc* out) {
    State& s = state();
    auto& cq = static_cast<SoftCq&>(*raw);
    {
        QueueLock lock(s, cq.lock);
        if (s.plain) return take(cq, n, out);
    }
    Lock lock(s);
    if (cq.done.empty()) {
        idle(s);
        return 0;  // what completes now is found at the next look, by a clock that was read meanwhile
    }
    int count = take(cq, n, out);
    if (count != 0) {
        s.idle_polls = 0;
        s.last_work = ++s.acts;
    }
    return count;
}

int req_notify_cq(Cq* raw, int) {
    State& s = state();
    auto& cq = static_cast<SoftCq&>(*raw);
    {
        QueueLock lock(s, cq.lock);
        if (s.plain) {
            cq.armed = true;
            return 0;
        }
    }
    Lock lock(s);
    cq.armed = true;
    cq.armed_at = ++s.acts;
    s.armed_ns = clock_ns(s);
    return 0;
}

// Executes requests that go well, under the lock of their completion queue alone. -> the first that does not,
// of which nothing was done; null: there is none.
SendWr* post_plain(State& s, SoftQp& qp, SendWr* wr) {
    auto& cq = static_cast<SoftCq&>(*qp.send_cq);
    QueueLock lock(s, cq.lock);
    const int device = qp.row->device;
    if (!s.plain || qp.row->state != kReadyToSend || qp.lost || is_silent(s, qp)) return wr;
    if (!s.under_way[device].empty() || !s.wire.empty()) return wr;
    Counts& counts = s.counts[cq.lock];
    for (; wr != nullptr; wr = wr->next) {
        const Sge& sge = *wr->sg_list;
        const bool write = wr->opcode == kWrite;
        if (qp.open == qp.requests_max || cq.done.size() >= static_cast<size_t>(cq.cqe)) return wr;
        const bool inlined = (wr->send_flags & kInline) != 0;
        char* local = inlined ? reinterpret_cast<char*>(sge.addr) : find_own(s, sge, write);
        if (local == nullptr || land(s, qp.qp_num, qp.row->dest, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr,
                                     local, sge.length, write) != 0) {
            return wr;
        }
        ++qp.open;
        ++counts.requests;
        if ((wr->send_flags & kSignaled) != 0) ++counts.signaled;
        if (inlined) ++counts.inlined;
        counts.bytes[device] += sge.length;
        complete(s, qp, *wr, 0, 0);
    }
    ++counts.posts;
    return nullptr;
}

int post_send(Qp* raw, SendWr* wr, SendWr** bad) {
    State& s = state();
    auto& qp = static_cast<SoftQp&>(*raw);
    wr = post_plain(s, qp, wr);
    if (wr == nullptr) return 0;
    Lock lock(s);
    s.idle_polls = 0;
    s.last_work = ++s.acts;
    if (s.script.full.contains(++s.posts)) {
        *bad = wr;
        return ENOMEM;
    }
    for (; wr != nullptr; wr = wr->next) {
        if (qp.row->state != kReadyToSend && qp.row->state != kError) {
            *bad = wr;
            return EINVAL;
        }
        if (++qp.open > qp.requests_max) {
            *bad = wr;
            return ENOMEM;
        }
        Request request{0, qp.qp_num, *wr, *wr->sg_list, {}, ++s.requests};
        tell_held(s, request.ordinal);
        if ((wr->send_flags & kSignaled) != 0) ++s.signaled;
        if ((wr->send_flags & kInline) != 0) {
            ++s.inlined;
            const char* from = reinterpret_cast<const char*>(wr->sg_list->addr);
            OrderedByThePeer scope;
            request.inlined.assign(from, from + wr->sg_list->length);
        }
        int device = qp.row->device;
        s.bytes[device] += wr->sg_list->length;
        uint64_t speed = s.script.speed[device];
        if (speed == 0 && s.under_way[device].empty()) {
            execute(s, request);
            continue;
        }
        uint64_t now = clock_ns(s);
        s.busy_until[device] =
            std::max(s.busy_until[device], now) + wr->sg_list->length * 1000 / std::max<uint64_t>(speed, 1);
        request.due_ns = s.busy_until[device];
        s.under_way[device].push_back(std::move(request));
        if (!s.thread) {
            s.thread = true;
            std::thread(run_nic).detach();
        }
    }
    return 0;
}

Gid address_of(int device, const std::string& kind) {
    Gid gid{};
    if (kind == "v4") {
        gid.raw[10] = gid.raw[11] = 0xff;
        const uint8_t ip[] = {10, 8, static_cast<uint8_t>(device), 1};
        std::memcpy(gid.raw + 12, ip, sizeof(ip));
    } else if (kind == "v6") {
        gid.raw[0] = 0xfd;
        gid.raw[15] = static_cast<uint8_t>(device + 1);
    } else {
        gid.raw[0] = 0xfe;
        gid.raw[1] = 0x80;
        gid.raw[15] = static_cast<uint8_t>(device + 1);
    }
    return gid;
}

void tell_engines(State& s, int device, const AsyncEvent& event) {
    for (SoftContext* context : s.contexts) {
        if (context->index != device) continue;
        context->events.push_back(event);
        uint64_t one = 1;
        (void)!::write(context->async_fd, &one, sizeof(one));
    }
}

// Of the GIDs by which a device of such a script is reached.
std::vector<std::string> kinds_of(const std::string& gids) {
    return gids == "both" ? std::vector<std::string>{"v4", "v6"} : std::vector<std::string>{gids};
}

SoftContext& of(Context* context) { return static_cast<SoftContext&>(*context); }

// at: where this process has the bytes. Null: no memory, as the script says.
SoftMr* add_key(State& s, Pd& pd, uint64_t address, size_t bytes, int access, uint64_t at) {
    ++s.registrations;
    if (s.script.no_memory.contains(s.registrations) || s.registrations >= s.script.no_memory_from) {
        errno = ENOMEM;
        return nullptr;
    }
    uint32_t number = s.shared->next_key;
    while (s.shared->keys[number % std::size(s.shared->keys)].used) ++number;
    s.shared->next_key = (number + 1) & 0xffffff;
    KeyRow& row = s.shared->keys[number % std::size(s.shared->keys)];
    row = {true, s.pid, number << 8, access, address, bytes, at};
    ++of(pd.context).objects;
    ++s.objects;
    auto* made = new SoftMr{};
    static_cast<Mr&>(*made) = {pd.context, &pd,    reinterpret_cast<void*>(address), bytes, number,
                               row.key,    row.key};
    return made;
}

}  // namespace

extern "C" {

#pragma GCC diagnostic ignored "-Wmissing-declarations"

Device** ibv_get_device_list(int* n) {
    State& s = state();
    Lock lock(s);
    if (s.script.no_kernel) {
        errno = ENOSYS;
        return nullptr;
    }
    auto** list = static_cast<Device**>(std::calloc(kDevicesMax + 1, sizeof(Device*)));
    for (int i = 0; i < s.script.devices; ++i) list[i] = reinterpret_cast<Device*>(&s.devices[i]);
    *n = s.script.devices;
    return list;
}
void ibv_free_device_list(Device** list) { std::free(list); }
const char* ibv_get_device_name(Device* device) { return reinterpret_cast<SoftDevice*>(device)->name; }

Context* ibv_open_device(Device* device) {
    State& s = state();
    Lock lock(s);
    auto* context = new SoftContext{};
    context->device = device;
    context->index = reinterpret_cast<SoftDevice*>(device)->index;
    context->ops.poll_cq = poll_cq;
    context->ops.req_notify_cq = req_notify_cq;
    context->ops.post_send = post_send;
    context->cmd_fd = ::eventfd(0, EFD_CLOEXEC);
    context->async_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    context->num_comp_vectors = 1;
    s.contexts.push_back(context);
    ++s.objects;
    return context;
}
int ibv_close_device(Context* context) {
    State& s = state();
    Lock lock(s);
    if (of(context).objects != 0) {
        ++s.violations;
        return EBUSY;
    }
    std::erase(s.contexts, &of(context));
    ::close(context->cmd_fd);
    ::close(context->async_fd);
    delete &of(context);
    --s.objects;
    return 0;
}
int ibv_query_device(Context*, DeviceAttr* out) {
    out->max_qp = 2 * state().script.pairs;
    out->max_qp_wr = 8192;
    out->max_qp_rd_atom = out->max_qp_init_rd_atom = 16;
    out->ports = 1;
    return 0;
}
int ibv_query_port(Context* context, uint8_t, PortAttr* out) {
    State& s = state();
    Lock lock(s);
    int index = of(context).index;
    out->state = s.shared->down[index] ? 1 : kPortActive;
    out->max_mtu = 5;
    out->active_mtu = s.script.mtu[index];
    out->gid_tbl_len = 8;
    out->lid = s.script.infiniband ? static_cast<uint16_t>(index + 1) : 0;
    out->link_layer = s.script.infiniband ? kInfiniBand : s.script.efa ? 0 : kEthernet;
    out->active_width = 2;
    out->active_speed = 32;
    return 0;
}
int _ibv_query_gid_ex(Context* context, uint32_t, uint32_t index, GidEntry* out, uint32_t, size_t) {
    State& s = state();
    Lock lock(s);
    int device = of(context).index;
    const std::string& kind = s.script.gids;
    *out = {};
    out->index = index;
    out->type = 2;
    if (s.script.infiniband && index == 0) {
        out->type = 0;
        out->gid = address_of(device, "v6");
        return 0;
    }
    if (kind == "none") return ENODATA;
    if (index == 0) {
        out->gid = address_of(device, "local");
        out->type = 1;
        return 0;
    }
    if (kind == "v1") return ENODATA;
    if (index == 2) out->gid = address_of(device, "local");
    const std::vector<std::string> kinds = kinds_of(kind);
    if (index >= 3 && index < 3 + kinds.size()) out->gid = address_of(device, kinds[index - 3]);
    return index >= 2 && index < 3 + kinds.size() ? 0 : ENODATA;  // 1 is a hole
}
int ibv_query_gid(Context* context, uint8_t port, int index, Gid* out) {
    GidEntry entry;
    int code = _ibv_query_gid_ex(context, port, static_cast<uint32_t>(index), &entry, 0, sizeof(entry));
    *out = entry.gid;
    return code;
}

Pd* ibv_alloc_pd(Context* context) {
    State& s = state();
    Lock lock(s);
    ++of(context).objects;
    ++s.objects;
    return new Pd{context, 1};
}
int ibv_dealloc_pd(Pd* pd) {
    State& s = state();
    Lock lock(s);
    --of(pd->context).objects;
    --s.objects;
    delete pd;
    return 0;
}

Mr* ibv_reg_mr_iova2(Pd* pd, void* at, size_t bytes, uint64_t, unsigned access) {
    State& s = state();
    Lock lock(s);
    auto address = reinterpret_cast<uint64_t>(at);
    for (const PeerMemory& card : s.peermem) {
        if (address < card.address || bytes > card.bytes || address - card.address > card.bytes - bytes)
            continue;
        auto seen = reinterpret_cast<uint64_t>(card.seen + (address - card.address));
        return add_key(s, *pd, address, bytes, static_cast<int>(access), seen);
    }
    char byte = 0;
    iovec here{&byte, 1}, there{at, 1};
    if (::process_vm_readv(s.pid, &here, 1, &there, 1, 0) != 1) {  // of a card: no page of the host
        errno = EFAULT;
        return nullptr;
    }
    return add_key(s, *pd, address, bytes, static_cast<int>(access), address);
}
Mr* ibv_reg_mr(Pd* pd, void* at, size_t bytes, int access) {
    return ibv_reg_mr_iova2(pd, at, bytes, 0, static_cast<unsigned>(access));
}
// A memfd stands for the buffer; the buffer begins at the descriptor's own offset.
Mr* ibv_reg_dmabuf_mr(Pd* pd, uint64_t offset, size_t bytes, uint64_t iova, int fd, int access) {
    State& s = state();
    Lock lock(s);
    if (s.script.no_dma_buf) {
        errno = EOPNOTSUPP;
        return nullptr;
    }
    const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    const uint64_t from = static_cast<uint64_t>(::lseek(fd, 0, SEEK_CUR)) + offset, before = from % page;
    void* mapped = ::mmap(nullptr, before + bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                          static_cast<off_t>(from - before));
    if (mapped == MAP_FAILED) return nullptr;
    SoftMr* made = add_key(s, *pd, iova, bytes, access, reinterpret_cast<uint64_t>(mapped) + before);
    if (made == nullptr) {
        ::munmap(mapped, before + bytes);
        return nullptr;
    }
    made->mapped = mapped;
    made->mapped_bytes = before + bytes;
    return made;
}
int ibv_dereg_mr(Mr* mr) {
    State& s = state();
    Lock lock(s);
    if (KeyRow* row = find_key(s, mr->lkey)) row->used = false;
    --of(mr->context).objects;
    --s.objects;
    auto* soft = static_cast<SoftMr*>(mr);
    if (soft->mapped != nullptr) ::munmap(soft->mapped, soft->mapped_bytes);
    delete soft;
    return 0;
}

Channel* ibv_create_comp_channel(Context* context) {
    State& s = state();
    Lock lock(s);
    ++of(context).objects;
    ++s.objects;
    auto* channel = new SoftChannel{};
    channel->context = context;
    channel->fd = ::eventfd(0, EFD_CLOEXEC);
    return channel;
}
int ibv_destroy_comp_channel(Channel* channel) {
    State& s = state();
    Lock lock(s);
    --of(channel->context).objects;
    --s.objects;
    ::close(channel->fd);
    delete static_cast<SoftChannel*>(channel);
    return 0;
}
Cq* ibv_create_cq(Context* context, int entries, void* user, Channel* channel, int) {
    State& s = state();
    Lock lock(s);
    auto* cq = new SoftCq{};
    cq->context = context;
    cq->channel = channel;
    cq->cq_context = user;
    cq->cqe = entries;
    cq->lock = s.next_lock++ % kLocks;
    ++of(context).objects;
    ++s.objects;
    if (channel != nullptr) s.cqs.insert(cq);
    return cq;
}
int ibv_destroy_cq(Cq* raw) {
    State& s = state();
    Lock lock(s);
    auto* cq = static_cast<SoftCq*>(raw);
    if (cq->pairs != 0) {
        ++s.violations;
        return EBUSY;
    }
    s.cqs.erase(cq);
    std::erase_if(s.held, [&](const Told& told) { return told.cq == cq; });
    std::erase_if(s.swapped, [&](const Told& told) { return told.cq == cq; });
    --of(cq->context).objects;
    --s.objects;
    delete cq;
    return 0;
}
int ibv_get_cq_event(Channel* channel, Cq** cq, void** user) {
    uint64_t n;
    if (::read(channel->fd, &n, sizeof(n)) != sizeof(n)) return -1;
    *cq = nullptr;
    *user = nullptr;
    return 0;
}
void ibv_ack_cq_events(Cq*, unsigned) {}

Qp* ibv_create_qp(Pd* pd, QpInit* init) {
    State& s = state();
    Lock lock(s);
    uint32_t number = s.shared->next_pair, tried = 0;
    while (s.shared->pairs[number % std::size(s.shared->pairs)].used) {
        if (++tried == std::size(s.shared->pairs)) {
            errno = ENOMEM;
            return nullptr;
        }
        ++number;
    }
    s.shared->next_pair = number + 1;
    auto* qp = new SoftQp{};
    qp->context = pd->context;
    qp->pd = pd;
    qp->send_cq = init->send_cq;
    qp->recv_cq = init->recv_cq;
    qp->qp_num = number;
    qp->all_signaled = init->sq_sig_all != 0;
    qp->requests_max = init->cap.max_send_wr;
    qp->row = &s.shared->pairs[number % std::size(s.shared->pairs)];
    *qp->row = {};
    qp->row->used = true;
    qp->row->pid = s.pid;
    qp->row->number = number;
    qp->row->device = of(pd->context).index;
    s.pairs[number] = qp;
    ++static_cast<SoftCq*>(init->send_cq)->pairs;
    ++of(pd->context).objects;
    ++s.objects;
    return qp;
}
int ibv_modify_qp(Qp* raw, QpAttr* attr, int fields) {
    State& s = state();
    Lock lock(s);
    auto* qp = static_cast<SoftQp*>(raw);
    if (attr->qp_state == kReadyToReceive) {
        if ((fields & kDest) == 0 || qp->row->state != kInit) return EINVAL;
        if (attr->path_mtu < 1 || attr->path_mtu > s.script.mtu[qp->row->device]) return EINVAL;
        // A GID that no port has is looked for, and not found.
        bool known = s.script.infiniband;
        for (int i = 0; i < kDevicesMax && !known; ++i) {
            for (const std::string& kind : kinds_of(s.script.gids)) {
                if (s.script.gone[i] == "all" || s.script.gone[i] == kind) continue;
                Gid gid = address_of(i, kind);
                known = known || std::memcmp(gid.raw, attr->ah_attr.grh.dgid.raw, sizeof(gid.raw)) == 0;
            }
        }
        if (!known) return ETIMEDOUT;
        qp->row->dest = attr->dest_qp_num;
        qp->row->mtu = attr->path_mtu;
    }
    if (attr->qp_state == kReadyToSend && qp->row->state != kReadyToReceive) return EINVAL;
    if (attr->qp_state == kReadyToSend && attr->retry_cnt > 6) ++s.violations;  // for ever, to soft RoCE
    qp->state = qp->row->state = attr->qp_state;
    if (attr->qp_state == kReset) qp->lost = false;
    return 0;
}
int ibv_destroy_qp(Qp* raw) {
    State& s = state();
    Lock lock(s);
    auto* qp = static_cast<SoftQp*>(raw);
    for (auto& queue : s.under_way) {
        std::erase_if(queue, [&](const Request& request) { return request.pair == qp->qp_num; });
    }
    auto& cq = static_cast<SoftCq&>(*qp->send_cq);
    --cq.pairs;
    s.pairs.erase(qp->qp_num);
    qp->row->used = false;
    --of(qp->context).objects;
    --s.objects;
    delete qp;
    return 0;
}

int ibv_get_async_event(Context* context, AsyncEvent* out) {
    State& s = state();
    Lock lock(s);
    SoftContext& soft = of(context);
    if (soft.events.empty()) {
        uint64_t n;
        (void)!::read(context->async_fd, &n, sizeof(n));
        errno = EAGAIN;
        return -1;
    }
    *out = soft.events.front();
    soft.events.pop_front();
    return 0;
}
void ibv_ack_async_event(AsyncEvent*) {}
const char* ibv_wc_status_str(int status) {
    static const char* const kTexts[] = {"success",
                                         "local length error",
                                         "local QP operation error",
                                         "local EE context operation error",
                                         "local protection error",
                                         "Work Request Flushed Error",
                                         "memory management operation error",
                                         "bad response error",
                                         "local access error",
                                         "remote invalid request error",
                                         "remote access error",
                                         "remote operation error",
                                         "transport retry counter exceeded",
                                         "RNR retry counter exceeded"};
    return status >= 0 && status < 14 ? kTexts[status] : "unknown";
}
int ibv_fork_init() { return 0; }
int ibv_is_fork_initialized() { return 2; }

// ---- controls

void soft_verbs_script(const char* script) {
    State& s = state();
    Lock lock(s);
    read_script(s, script);
}
void soft_verbs_port(int device, int up) {
    State& s = state();
    Lock lock(s);
    s.shared->down[device] = up == 0;
    tell_engines(s, device,
                 {reinterpret_cast<void*>(uintptr_t{1}), up != 0 ? kEventPortActive : kEventPortError});
}
void soft_verbs_gids(const char* gids) {
    State& s = state();
    Lock lock(s);
    s.script.gids = gids;
    for (int device = 0; device < kDevicesMax; ++device)
        tell_engines(s, device, {reinterpret_cast<void*>(uintptr_t{1}), kEventGid});
}
void soft_verbs_fatal(int device) {
    State& s = state();
    Lock lock(s);
    s.shared->silent[device] = true;
    tell_engines(s, device, {nullptr, kEventFatal});
}
void soft_verbs_peermem(uint64_t address, uint64_t bytes, char* seen) {
    State& s = state();
    Lock lock(s);
    s.peermem.push_back({address, bytes, seen});
}
void soft_verbs_silent(int device, int silent) {
    State& s = state();
    Lock lock(s);
    s.shared->silent[device] = silent != 0;
}
int soft_verbs_release() {
    State& s = state();
    Lock lock(s);
    int landed = 0;
    for (InWire& late : s.wire) {
        if (land_late(s, late)) {
            ++landed;
            ++s.landed_late;
        } else {
            ++s.dropped_late;
        }
    }
    s.wire.clear();
    return landed;
}
uint64_t soft_verbs_count(const char* what) {
    State& s = state();
    Lock lock(s);
    std::string name = what;
    Counts all{s.requests, s.posts, 0, s.signaled, s.inlined, {}};
    std::copy(std::begin(s.bytes), std::end(s.bytes), std::begin(all.bytes));
    for (const Counts& counts : s.counts) {
        all.requests += counts.requests;
        all.posts += counts.posts;
        all.events += counts.events;
        all.signaled += counts.signaled;
        all.inlined += counts.inlined;
        for (size_t i = 0; i < kDevicesMax; ++i) all.bytes[i] += counts.bytes[i];
    }
    if (name.starts_with("bytes")) return all.bytes[(name.back() - '0') % kDevicesMax];
    if (name == "under_way") {  // that wait for a device with a speed
        uint64_t sum = 0;
        for (const auto& queue : s.under_way) sum += queue.size();
        return sum;
    }
    return name == "objects"         ? s.objects
           : name == "violations"    ? s.violations
           : name == "requests"      ? all.requests
           : name == "posts"         ? all.posts
           : name == "events"        ? all.events  // that told of completions
           : name == "signaled"      ? all.signaled
           : name == "inlined"       ? all.inlined
           : name == "told_late"     ? s.told_late  // completions of held and swapped requests
           : name == "registrations" ? s.registrations
           : name == "pairs"         ? s.pairs.size()
           : name == "pairs_made"    ? s.shared->next_pair
           : name == "in_wire"       ? s.wire.size()
           : name == "dropped_late"  ? s.dropped_late
                                     : s.landed_late;
}
void soft_verbs_pass(uint64_t ns) {
    State& s = state();
    Lock lock(s);
    s.virtual_ns += ns;
}
uint64_t soft_verbs_now() {
    State& s = state();
    Lock lock(s);
    return clock_ns(s);
}

}  // extern "C"
