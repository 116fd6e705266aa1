// SimClient::Striped, the operations that read and remove.
#include <cstring>

#include "striped.hpp"

namespace moonpool::sim {

void SimClient::Striped::get() {
    stand([this, self = shared_from_this()](std::optional<Standing> now) {
        if (!now) return finish(Operation::kUnknown);
        if (now->size < 0) return end_get(0);
        if (!now->manifest) return is_no_manifest();
        read_steps.emplace(*now->manifest);
        drive_read();
    });
}

void SimClient::Striped::is_no_manifest() {
    find(Finding::kOtherBytes, "there is no manifest under a striped key");
    finish(Operation::kUnknown);
}

void SimClient::Striped::end_get(uint64_t value) {
    call->operation.value = value;
    finish(Operation::kDone);
}

void SimClient::Striped::drive_read() {
    using Wants = StripeReadSteps::Wants;
    auto self = shared_from_this();
    auto standing = [this, self](std::optional<Standing> now) {
        if (!now) return finish(Operation::kUnknown);
        read_steps->standing(*now);
        drive_read();
    };
    switch (read_steps->wants()) {
        case Wants::kStripes:
            return read_stripes();
        case Wants::kWhole:
            return is_no_manifest();
        case Wants::kSuccessor:
            return successor(1, standing);
        case Wants::kOther:
            return stand(standing);
        case Wants::kLost:
            return settle(read_steps->manifest(), [this, self] {
                read_steps->settled(lost_steps->present().front());
                drive_read();
            });
        case Wants::kFreeOrphans:
            return settle(LostStripeSteps::free_orphans({name(), read_steps->manifest()}, c.place_.own,
                                                        c.hash_, *c.locations_),
                          [this, self] {
                              read_steps->freed();
                              drive_read();
                          });
        case Wants::kDone:
            return end_get(read_steps->size() < 0 ? 0 : value_of(parts));
    }
}

void SimClient::Striped::read_stripes() {
    std::vector<std::string> names = read_steps->manifest().stripe_names();
    if (!c.planted_.stripes_mixed) parts.clear();
    parts.resize(names.size());
    auto is_known = std::make_shared<bool>(true);
    auto one = all_of(names.size() + 1, [this, self = shared_from_this(), is_known] {
        if (!*is_known) return finish(Operation::kUnknown);
        bool all = true;
        for (const std::string& bytes : parts) all &= bytes.size() == kStripeBytes;
        read_steps->stripes_read(all);
        drive_read();
    });
    for (size_t i = 0; i < names.size(); ++i) {
        if (!parts[i].empty()) {
            one();
            continue;
        }
        read(names[i], [self = shared_from_this(), i, is_known, one](std::optional<std::string> bytes) {
            *is_known &= bytes.has_value();
            if (bytes) self->parts[i] = *bytes;
            one();
        });
    }
    one();
}

uint64_t SimClient::Striped::value_of(const std::vector<std::string>& stripes) {
    uint64_t value = 0;
    std::memcpy(&value, stripes.front().data(), sizeof(value));
    for (size_t i = 0; i < stripes.size(); ++i) {
        if (stripes[i] != stripe_of(value, i)) find(Finding::kOtherBytes, "stripes of two values were read");
    }
    return value;
}

void SimClient::Striped::exist() {
    exists(name(), [this, self = shared_from_this()](Presence is) {
        if (is != Presence::kHit || c.planted_.stripes_unasked) return end_exist(is);
        whole([this, self](Presence is_whole) { end_exist(is_whole); });
    });
}

void SimClient::Striped::end_exist(Presence is) {
    call->operation.value = is == Presence::kHit;
    finish(is == Presence::kUnknown ? Operation::kUnknown : Operation::kDone);
}

void SimClient::Striped::whole(Then<Presence> then) {
    lookup_steps.emplace(1);
    drive_lookup(then);
}

void SimClient::Striped::drive_lookup(const Then<Presence>& then) {
    using Wants = StripeLookupSteps::Wants;
    auto self = shared_from_this();
    switch (lookup_steps->wants()) {
        case Wants::kStanding:
            return stand([this, self, then](std::optional<Standing> now) {
                Result<std::vector<Standing>> known = Error{Code::kUnavailable, "no answer"};
                if (now) known = std::vector{*now};
                lookup_steps->standing(known);
                drive_lookup(then);
            });
        case Wants::kStripes: {
            auto present = std::make_shared<std::vector<Presence>>(lookup_steps->names().size());
            auto one = all_of(present->size(), [this, self, present, then] {
                lookup_steps->stripes(*present);
                drive_lookup(then);
            });
            // Answers may come at once, and with the last one these names are others.
            std::vector<std::string> names = lookup_steps->names();
            for (size_t i = 0; i < names.size(); ++i) {
                exists(names[i], [present, i, one](Presence is) {
                    (*present)[i] = is;
                    one();
                });
            }
            return;
        }
        case Wants::kLost:
            return settle(lookup_steps->lost().front().second, [this, self, then] {
                lookup_steps->settled(lost_steps->present());
                drive_lookup(then);
            });
        case Wants::kDone:
            return then(lookup_steps->present().front());
    }
}

void SimClient::Striped::remove() {
    c.remove(part(Operation::kRemove, name(), {}, [this, self = shared_from_this()](Call& removed) {
        call->operation.alone = removed.operation.alone;
        call->operation.version = removed.operation.version;
        outcome = removed.operation.outcome;
        remove_stripes(shown(removed), [this, self] { finish(outcome); });
    }));
}

void SimClient::run_striped(const CallRef& call) {
    auto striped = std::make_shared<Striped>(*this, call);
    // The own node's life is known once it has been spoken to.
    connect(node_line(host()), [this, striped](const Status&) {
        switch (striped->call->operation.kind) {
            case Operation::kGet:
                return striped->get();
            case Operation::kExists:
                return striped->exist();
            case Operation::kRemove:
                return striped->remove();
            case Operation::kPin:
                return striped->pin();
            case Operation::kPut:
            case Operation::kReplace:
                return striped->put();
            case Operation::kUnique:  // of objects without stripes alone
                return finish(striped->call, Operation::kNothing);
        }
    });
}

}  // namespace moonpool::sim
