#include "master.hpp"

#include "frames.hpp"
#include "wire/error_frame.hpp"

namespace moonpool::sim {

void SimMaster::on_start() {
    master_ = std::make_unique<Master>(limits_, now_ms(), first_version(unix_ms()));
    tick();
}

void SimMaster::on_end() {
    links_.clear();
    master_.reset();
}

void SimMaster::tick() {
    master_->tick(now_ms());
    for (int i = 0; i < 16 && master_->sweep(); ++i) {
    }
    later(50 * kMs, [this] { tick(); });
}

void SimMaster::accept(std::shared_ptr<End> end, bool is_member) {
    LinkId id = next_link_++;
    MasterProtocolHost host{.master = *master_,
                            .beat_ms = 200,
                            .close_link = [this](LinkId link) { drop(link); },
                            .on_leave = {},
                            .on_join_refused = {}};
    end->on_frame = [this, id](const Bytes& frame) { on_frame(id, frame); };
    end->on_end = [this, id] { drop(id); };
    links_.emplace(id, Link{std::move(end), MasterProtocol(std::move(host), id, is_member, "default")});
}

void SimMaster::drop(LinkId id) {
    auto it = links_.find(id);
    if (it == links_.end()) return;
    it->second.end->close();
    it->second.protocol.closed();
    links_.erase(it);
}

void SimMaster::on_frame(LinkId id, const Bytes& frame) {
    auto it = links_.find(id);
    if (it == links_.end()) return;
    FrameHeader header = header_of(frame);
    uint64_t now = now_ms();
    Bytes out;
    std::shared_ptr<End> end = it->second.end;
    Status status = it->second.protocol.on_frame(now, header, body_of(frame), out);
    if (!status) {
        out.clear();
        write_error(out, status.error().code, status.error().text, 0);
    }
    if (!out.empty()) end->send(std::move(out));
    if (!status) drop(id);
}

}  // namespace moonpool::sim
