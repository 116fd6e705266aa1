// Which connection carries what callers want, and what follows when one fails.
//
// Threads: any. mutex_ guards the list of connections and who drives each; it is not held while a connection
// is dialled or driven, nor while a callback runs.
//
// Between two calls: a stream of streams_ is dialling, at most one at a time, or is driven by no thread, or a
// caller, or its loop. At most connections_max are in it. What is in the queue is seen: a thread that adds to
// it looks for a stream afterwards (wake), and one that lets go of a stream looks into the queue afterwards
// (idle), both under mutex_. A stream that is lost leaves the list and is fenced before what it carried is
// asked for again.
#include "transport/tcp/link.hpp"

#include <algorithm>

namespace moonpool::transport::tcp {

namespace {

// For so long after a further connection could not be made the others do alone.
constexpr uint64_t kDialAgainNs = 1000000000;

// The first connections of several peers are driven by several loops.
size_t next_link() {
    static std::atomic<size_t> last{0};
    return last.fetch_add(1);
}

}  // namespace

Link::Link(LinkOptions options, std::vector<EventLoop*> loops, Workers& waiters, TransportCounters& moved,
           Counters& counters)
    : options_(std::move(options)),
      loops_(std::move(loops)),
      waiters_(waiters),
      counters_(counters),
      queue_(moved, counters),
      next_loop_(next_link()) {}

Link::~Link() = default;

std::string Link::path() const {
    MutexLock lock(mutex_);
    return "tcp " + (path_.empty() ? options_.channel.dial.address : path_);
}

Status Link::adopt(Dialed dialed) {
    Result<std::unique_ptr<Channel>> channel = greet(options_.channel, std::move(dialed));
    if (!channel) return channel.error();
    MutexLock lock(mutex_);
    auto stream = std::make_shared<Stream>(queue_, *loops_[next_loop_++ % loops_.size()]);
    stream->open(std::move(*channel));
    stream->dialling = false;
    path_ = stream->channel()->path;
    streams_.push_back(std::move(stream));
    return success();
}

// ---- callers

Status Link::run(Job& job) {
    auto borrowed = std::shared_ptr<Job>(std::shared_ptr<void>(), &job);  // carry() returns after its end
    std::shared_ptr<Stream> mine = claim_idle();
    std::shared_ptr<Task> task = queue_.add(std::move(borrowed), nullptr, mine.get());
    carry(mine, *task);
    return queue_.wait(*task);
}

bool Link::post(const std::shared_ptr<Job>& job, const Finished& finished) {
    (void)queue_.add(job, finished, nullptr);
    wake(Spread::kOntoOne);
    return true;
}

Result<std::vector<std::byte>> Link::ask(Kind kind, const std::vector<std::byte>& body, int timeout_ms) {
    std::shared_ptr<Stream> mine = claim_idle();
    std::shared_ptr<Task> task = queue_.ask(kind, body, timeout_ms, nullptr, mine.get());
    carry(mine, *task);
    return queue_.wait_for_answer(*task);
}

void Link::post(Kind kind, const std::vector<std::byte>& body, int timeout_ms, Answered answered) {
    (void)queue_.ask(kind, body, timeout_ms, std::move(answered), nullptr);
    wake(Spread::kOntoOne);
}

// A question goes over no connection before that one has carried the fences: this one asks for nothing
// besides.
bool Link::settle(int timeout_ms) {
    if (settled()) return true;
    std::vector<std::byte> none;
    Writer(none).number(uint32_t{0});
    return ask(Kind::kEngineFence, none, timeout_ms).ok() && settled();
}

// An idle connection is the caller's to drive; for want of one the task joins those of others.
void Link::carry(const std::shared_ptr<Stream>& mine, Task& task) {
    if (mine != nullptr) {
        mine->drive(*this, task);
    } else {
        wake(Spread::kOverConnections);
    }
}

std::shared_ptr<Stream> Link::claim_idle() {
    MutexLock lock(mutex_);
    for (const auto& stream : streams_) {
        if (stream->dialling || stream->driver != Stream::Driver::kNone) continue;
        stream->driver = Stream::Driver::kCaller;
        stream->waker = Stream::waker_of_this_thread();
        return stream;
    }
    return nullptr;
}

// ---- connections

void Link::wake(Spread spread) {
    std::shared_ptr<Stream> fresh;
    {
        MutexLock lock(mutex_);
        if (closed_) return;
        std::shared_ptr<Stream> idle, least;
        bool dialling = false;
        uint64_t now = now_ns();
        for (const auto& stream : streams_) {
            if (stream->dialling) {
                dialling = true;
            } else if (stream->driver == Stream::Driver::kNone) {
                if (idle == nullptr) idle = stream;
            } else if (least == nullptr || stream->load(now) < least->load(now)) {
                least = stream;
            }
        }
        if (least != nullptr && spread == Spread::kOntoOne && least->carries_little(now)) {
            return least->nudge();
        }
        if (idle != nullptr) {
            idle->driver = Stream::Driver::kLoop;
            return idle->start(shared_from_this());
        }
        // One without room looks into the queue when it has some.
        if (least != nullptr && (spread != Spread::kForHelp || least->has_room())) least->nudge();
        bool may = streams_.size() < options_.connections_max && (least == nullptr || now >= dial_again_ns_);
        if (!dialling && may) fresh = add_dialling();
    }
    if (fresh != nullptr) dial(fresh);
}

std::shared_ptr<Stream> Link::add_dialling() {
    auto stream = std::make_shared<Stream>(queue_, *loops_[next_loop_++ % loops_.size()]);
    stream->driver = Stream::Driver::kLoop;
    streams_.push_back(stream);
    return stream;
}

void Link::dial(const std::shared_ptr<Stream>& stream) {
    stream->start(shared_from_this());
    waiters_.post(false, [self = shared_from_this(), stream] {
        ChannelOptions options = self->options_.channel;
        options.dial.given_up = &self->closed_;
        self->counters_.dials_total.fetch_add(1);
        Result<Dialed> dialed = moonpool::dial(options.dial);
        tell_trouble(options);
        if (!dialed) return stream->dialled(dialed.error());
        stream->dialled(greet(options, std::move(*dialed)));
    });
}

void Link::opened(Stream& stream) {
    MutexLock lock(mutex_);
    stream.dialling = false;
    path_ = stream.channel()->path;
}

bool Link::idle(Stream& stream, bool busy) {
    MutexLock lock(mutex_);
    if (busy || (!closed_ && queue_.has_work(&stream))) {
        stream.driver = Stream::Driver::kLoop;
        return false;
    }
    stream.driver = Stream::Driver::kNone;
    if (closed_) std::erase_if(streams_, [&](const auto& each) { return each.get() == &stream; });
    return true;
}

void Link::not_dialled(const std::shared_ptr<Stream>& stream, const Error& error) {
    bool alone = false;
    {
        MutexLock lock(mutex_);
        std::erase(streams_, stream);
        alone = streams_.empty();
        dial_again_ns_ = now_ns() + kDialAgainNs;
    }
    if (alone) queue_.unreachable(error);
    if (queue_.has_work(nullptr)) wake(Spread::kOntoOne);
}

void Link::lost(const std::shared_ptr<Stream>& stream, const Error& error) {
    std::vector<std::shared_ptr<Stream>> gone = {stream};
    {
        MutexLock lock(mutex_);
        // The idle ones lead to the same peer, and would fail one after the other.
        for (const auto& each : streams_) {
            if (!each->dialling && each->driver == Stream::Driver::kNone) gone.push_back(each);
        }
        std::erase_if(streams_,
                      [&](const auto& each) { return std::ranges::find(gone, each) != gone.end(); });
    }
    std::vector<uint32_t> fences;
    for (const auto& each : gone) {
        if (each->channel() != nullptr && each->channel()->wrote) fences.push_back(each->channel()->number);
    }
    queue_.fence(fences);
    stream->fail(error);
    if (queue_.has_work(nullptr)) wake(Spread::kOverConnections);
}

void Link::close() {
    closed_ = true;
    queue_.close();
    MutexLock lock(mutex_);
    std::erase_if(streams_,
                  [](const auto& each) { return !each->dialling && each->driver == Stream::Driver::kNone; });
    for (const auto& each : streams_) each->nudge();
}

}  // namespace moonpool::transport::tcp
