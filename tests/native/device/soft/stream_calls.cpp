// The driver: streams, events, and graph capture, which here takes nothing and can be broken.
#include <memory>

#include "call.hpp"

using namespace moonpool::soft;
using namespace moonpool::device;

extern "C" {

int cuStreamCreateWithPriority(Stream** stream, unsigned flags, int priority) {
    Call call("cuStreamCreateWithPriority", kContext);
    if (call.code != 0) return call.code;
    if ((flags & cu::kStreamNonBlocking) == 0)
        state().violation("a stream that waits for the default stream");
    state().all_streams.push_back(std::make_unique<Stream>());
    *stream = state().all_streams.back().get();
    (*stream)->card = Call::current()->card;
    (*stream)->priority = priority;
    constexpr unsigned kHastes[] = {64, 8, 0, 0};  // half of them run on demand only
    (*stream)->haste = kHastes[state().below(4)];
    state().streams.insert(*stream);
    return 0;
}

int cuStreamDestroy_v2(Stream* stream) {
    Call call("cuStreamDestroy", kContext | kUndoes);
    if (call.code != 0) return call.code;
    if (!known(stream, "cuStreamDestroy")) return kInvalidHandle;
    state().streams.erase(stream);
    return state().broken;
}

int cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    Call call("cuStreamWaitEvent", kContext);
    if (call.code != 0) return call.code;
    if (!known(stream, "cuStreamWaitEvent") || !known(event, "cuStreamWaitEvent")) return kInvalidHandle;
    if (event->stream == nullptr) return 0;
    Operation wait;
    wait.waits_for = event->stream;
    wait.waits_place = event->place;
    state().queue(stream, std::move(wait));
    return state().broken;
}

// Graphs: a capture takes nothing here; what counts is that no other thread breaks it.
int cuStreamBeginCapture_v2(Stream* stream, int) {
    Call call("cuStreamBeginCapture", kContext);
    if (call.code == 0) {
        stream->capturing = true;
        stream->capture_broken = false;
    }
    return call.code;
}

int cuStreamEndCapture(Stream* stream, void** graph) {
    Call call("cuStreamEndCapture", kContext);
    *graph = nullptr;
    stream->capturing = false;
    return call.code != 0 ? call.code : stream->capture_broken ? cu::kCaptureInvalidated : 0;
}

int cuEventCreate(Event** event, unsigned) {
    Call call("cuEventCreate", kContext);
    if (call.code != 0) return call.code;
    state().all_events.push_back(std::make_unique<Event>());
    *event = state().all_events.back().get();
    state().events.insert(*event);
    return 0;
}

int cuEventDestroy_v2(Event* event) {
    Call call("cuEventDestroy", kContext | kUndoes);
    if (call.code != 0) return call.code;
    if (!known(event, "cuEventDestroy")) return kInvalidHandle;
    state().events.erase(event);
    return state().broken;
}

int cuEventRecord(Event* event, Stream* stream) {
    Call call("cuEventRecord", kContext);
    if (call.code != 0) return call.code;
    if (!known(stream, "cuEventRecord") || !known(event, "cuEventRecord")) return kInvalidHandle;
    event->stream = stream;
    event->place = stream->given + 1;
    event->asked = 0;
    state().queue(stream, Operation{});
    return state().broken;
}

int cuEventQuery(Event* event) {
    Call call("cuEventQuery", kContext | kUnsafe);
    if (call.code != 0) return call.code;
    State& s = state();
    if (!known(event, "cuEventQuery")) return kInvalidHandle;
    if (event->stream == nullptr) return 0;
    // Asked so often, the caller waits for it.
    int patience = s.policy == Policy::kShuffled ? 20 : 2;
    if (++event->asked > patience) s.demand(event->stream, event->place);
    if (s.broken != 0) return s.broken;
    return event->stream->ended >= event->place ? cu::kSuccess : cu::kNotReady;
}

}  // extern "C"
