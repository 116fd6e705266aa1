// SimClient::Striped, pin. It reads what it pinned after a while: all of it has to be there.
#include "base/crc32c.hpp"
#include "striped.hpp"

namespace moonpool::sim {

void SimClient::Striped::pin() {
    pin(name(), [this, self = shared_from_this()](const Pinned& pinned) {
        if (pinned.pin == 0) return finish(pinned.is_known ? Operation::kNothing : Operation::kUnknown);
        key_pin = pinned;
        read_pinned(pinned, [this, self](const Result<std::string>& bytes) {
            if (!bytes) return end_pin(Operation::kUnknown);
            std::optional<Manifest> found = decode_manifest(as_bytes(*bytes), cluster_secrets(), name());
            if (!found) return end_pin(Operation::kUnknown);
            pin_steps.emplace(*found);
            drive_pin();
        });
    });
}

void SimClient::Striped::end_pin(Operation::Outcome is) {
    release(key_pin);
    for (const Pinned& pinned : pins) release(pinned);
    finish(is);
}

void SimClient::Striped::drive_pin() {
    using Wants = StripePinSteps::Wants;
    auto self = shared_from_this();
    switch (pin_steps->wants()) {
        case Wants::kPinStripes:
            return pin_stripes();
        case Wants::kPinKey:
            return pin_key();
        case Wants::kLost:
            return settle(pin_steps->manifest(), [this, self] {
                pin_steps->settled(lost_steps->present().front());
                drive_pin();
            });
        case Wants::kDone:
            if (pin_steps->outcome() != StripePinSteps::Outcome::kPinned) return end_pin(Operation::kNothing);
            return c.later(c.world_.random.between(1, 300) * kMs, [self] { self->check_pins(); });
    }
}

void SimClient::Striped::pin_stripes() {
    std::vector<std::string> names = pin_steps->manifest().stripe_names();
    pins.assign(names.size(), {});
    auto one = all_of(names.size(), [this, self = shared_from_this()] {
        bool all = true, is_known = true;
        for (const Pinned& pinned : pins) {
            all &= pinned.what.generation != 0;
            is_known &= pinned.is_known;
        }
        if (!all) {
            for (const Pinned& pinned : pins) release(pinned);
            pins.clear();
        }
        pin_steps->stripes(all, is_known);
        drive_pin();
    });
    for (size_t i = 0; i < names.size(); ++i) {
        pin(names[i], [this, self = shared_from_this(), i, one](const Pinned& pinned) {
            pins[i] = pinned;
            if (c.planted_.stripes_unpinned && i != 0) {
                release(pinned);
                pins[i].pin = 0;
            }
            one();
        });
    }
}

void SimClient::Striped::pin_key() {
    pin(name(), [this, self = shared_from_this()](const Pinned& pinned) {
        if (pinned.pin == 0) {
            pin_steps->key(std::nullopt);
            return drive_pin();
        }
        read_pinned(pinned, [this, self, pinned](const Result<std::string>& bytes) {
            std::optional<Standing> now;
            if (bytes && !bytes->empty())
                now = standing_of(static_cast<int64_t>(bytes->size()), as_bytes(*bytes), cluster_secrets(),
                                  name());
            if (now && now->manifest != pin_steps->manifest()) {
                release(key_pin);
                key_pin = pinned;
            } else {
                release(pinned);
            }
            pin_steps->key(now);
            drive_pin();
        });
    });
}

void SimClient::Striped::check_pins() {
    auto all = std::make_shared<std::vector<std::string>>(pins.size());
    auto is_known = std::make_shared<bool>(true);
    auto one = all_of(pins.size(), [this, self = shared_from_this(), all, is_known] {
        for (const Pinned& pinned : pins) *is_known &= holds(pinned);
        if (!*is_known) return end_pin(Operation::kUnknown);
        bool lost = false;
        for (size_t i = 0; i < pins.size(); ++i) {
            const std::string& bytes = (*all)[i];
            lost |= bytes.size() != pins[i].what.size ||
                    crc32c(0, bytes.data(), bytes.size()) != pins[i].what.crc;
        }
        if (lost) {
            find(Finding::kPinLost, "a stripe that was pinned is not there");
        } else {
            value_of(*all);
        }
        end_pin(Operation::kDone);
    });
    for (size_t i = 0; i < pins.size(); ++i) {
        if (!holds(pins[i])) {
            *is_known = false;
            one();
            continue;
        }
        read_pinned(pins[i], [all, is_known, i, one](const Result<std::string>& bytes) {
            *is_known &= bytes.ok();
            if (bytes) (*all)[i] = *bytes;
            one();
        });
    }
}

}  // namespace moonpool::sim
