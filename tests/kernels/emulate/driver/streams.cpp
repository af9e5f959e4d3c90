// Streams and events.
#include "driver.hpp"

#include <chrono>
#include <map>

namespace {

using Clock = std::chrono::steady_clock;

Stream legacy{true, {}};
std::map<void *, std::unique_ptr<Stream>> streams;
uint64_t next_number = 1;

struct Event {
    bool timed;
    bool recorded = false;
    bool done = true;       // an event that was never recorded is
    void *stream = nullptr; // handle of where it was recorded last
    uint64_t number = 0;    // of the record
    Clock::time_point at{};
};
std::map<void *, std::shared_ptr<Event>> events;

std::shared_ptr<Event> event_of(void *handle) {
    auto found = events.find(handle);
    return found == events.end() ? nullptr : found->second;
}

void run_one(Stream &stream) {
    Work work = std::move(stream.work.front());
    stream.work.pop_front();
    if (&stream == &legacy) {
        for (auto &[handle, other] : streams)
            if (other->blocking) drain(*other, work.number);
    } else if (stream.blocking) {
        drain(legacy, work.number);
    }
    if (!driver.broken) work.run();
}

// Runs what an event waits for. A stream that is gone has nothing left to do.
void drain_up_to(void *handle, uint64_t number) {
    if (Stream *stream = stream_of(handle)) drain(*stream, number + 1);
}

// Who asks again and again gets on: each question lets one piece of work run.
Result question(Stream &stream, bool &done) {
    if (!done && !stream.work.empty()) run_one(stream);
    return driver.broken ? driver.broken : done ? SUCCESS : NOT_READY;
}

} // namespace

Stream *stream_of(void *handle) {
    if (!handle || handle == reinterpret_cast<void *>(1)) return &legacy; // CU_STREAM_LEGACY
    auto found = streams.find(handle);
    return found == streams.end() ? nullptr : found->second.get();
}

uint64_t enqueue(Stream &stream, std::function<void()> run) {
    stream.work.push_back({next_number, std::move(run)});
    return next_number++;
}

void drain(Stream &stream, uint64_t before) {
    while (!stream.work.empty() && stream.work.front().number < before) run_one(stream);
}

void drain_all() {
    drain(legacy);
    for (auto &[handle, stream] : streams) drain(*stream);
}

void forget_streams() {
    is_timing = false;
    legacy.work.clear();
    streams.clear();
    events.clear();
}

API cuStreamCreate(void **handle, unsigned flags) {
    BEGIN(context);
    if (flags > 1) return INVALID_VALUE;
    auto stream = std::make_unique<Stream>(Stream{flags == 0, {}}); // 1: CU_STREAM_NON_BLOCKING
    *handle = stream.get();
    streams[*handle] = std::move(stream);
    return SUCCESS;
}

API cuStreamDestroy_v2(void *handle) {
    BEGIN(context);
    auto found = streams.find(handle);
    if (found == streams.end()) return INVALID_HANDLE;
    drain(*found->second);
    streams.erase(found);
    return driver.broken;
}

API cuStreamSynchronize(void *handle) {
    BEGIN(context);
    Stream *stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    drain(*stream);
    if (stream == &legacy)
        for (auto &[name, other] : streams)
            if (other->blocking) drain(*other);
    return driver.broken;
}

API cuStreamQuery(void *handle) {
    BEGIN(context);
    Stream *stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    bool done = stream->work.empty();
    return question(*stream, done);
}

API cuStreamWaitEvent(void *handle, void *event_handle, unsigned) {
    BEGIN(context);
    Stream *stream = stream_of(handle);
    const auto event = event_of(event_handle);
    if (!stream || !event) return INVALID_HANDLE;
    if (!event->done) enqueue(*stream, [from = event->stream, number = event->number] { drain_up_to(from, number); });
    return SUCCESS;
}

API cuLaunchHostFunc(void *handle, void (*function)(void *), void *data) {
    BEGIN(context);
    Stream *stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    enqueue(*stream, [=] { function(data); });
    return SUCCESS;
}

API cuEventCreate(void **handle, unsigned flags) {
    BEGIN(context);
    auto event = std::make_shared<Event>();
    event->timed = !(flags & 2); // CU_EVENT_DISABLE_TIMING
    *handle = event.get();
    events[*handle] = event;
    return SUCCESS;
}

API cuEventDestroy_v2(void *handle) {
    BEGIN(context);
    return events.erase(handle) ? SUCCESS : INVALID_HANDLE;
}

API cuEventRecord(void *handle, void *stream_handle) {
    BEGIN(context);
    Stream *stream = stream_of(stream_handle);
    const auto event = event_of(handle);
    if (!stream || !event) return INVALID_HANDLE;
    if (event->timed) is_timing = !is_timing;
    event->stream = stream_handle;
    event->recorded = true, event->done = false;
    event->number = enqueue(*stream, [event, number = next_number] {
        if (event->number == number) event->done = true, event->at = Clock::now(); // else it was recorded again
    });
    return SUCCESS;
}

API cuEventSynchronize(void *handle) {
    BEGIN(context);
    const auto event = event_of(handle);
    if (!event) return INVALID_HANDLE;
    if (!event->done) drain_up_to(event->stream, event->number);
    return driver.broken;
}

API cuEventQuery(void *handle) {
    BEGIN(context);
    const auto event = event_of(handle);
    if (!event) return INVALID_HANDLE;
    if (event->done) return driver.broken;
    Stream *stream = stream_of(event->stream);
    return stream ? question(*stream, event->done) : INVALID_HANDLE;
}

// In milliseconds: how long the CPU took. There is no cuEventElapsedTime_v2, which came with CUDA 12.8: a driver of 12.0 is
// enough for the crate.
API cuEventElapsedTime(float *milliseconds, void *start, void *end) {
    BEGIN(context);
    const auto first = event_of(start), last = event_of(end);
    if (!first || !last || !first->timed || !last->timed || !first->recorded || !last->recorded) return INVALID_HANDLE;
    if (!first->done || !last->done) return NOT_READY;
    *milliseconds = std::chrono::duration<float, std::milli>(last->at - first->at).count();
    return SUCCESS;
}
