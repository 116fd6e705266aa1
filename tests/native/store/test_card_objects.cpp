// Objects whose parts lie on cards, put and got by the verbs of every object, on the software device under
// all its policies.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../random.hpp"
#include "device_kv_bed.hpp"
#include "memory/address.hpp"
#include "store/client/client.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

constexpr uint64_t kRingSlot = device::CardCopier::kRing.slot_bytes;

// A random block again and again, whose length is a prime: no two pages of these tests, nor what lies a slot
// apart, are alike.
void fill_with(Random& random, std::span<unsigned char> all) {
    std::vector<unsigned char> block(65521);
    random.fill(block.data(), block.size());
    for (size_t at = 0; at < all.size(); at += block.size()) {
        std::memcpy(&all[at], block.data(), std::min(block.size(), all.size() - at));
    }
}

// Memory of the software device's card as tests see it.
class OnCard {
   public:
    OnCard(const std::shared_ptr<device::Device>& device, uint64_t bytes)
        : memory_(device::must(device::DeviceMemory::allocate(device, bytes))),
          card_(static_cast<int16_t>(device->facts().ordinal)) {}

    std::span<unsigned char> bytes() const {
        char* at = soft_device().soft_at(memory_.address(), memory_.bytes());
        REQUIRE(at != nullptr);
        return {reinterpret_cast<unsigned char*>(at), memory_.bytes()};
    }
    void fill(Random& random) { fill_with(random, bytes()); }
    MemoryRef part(uint64_t at, uint64_t bytes) const {
        return {
            .address = memory_.address() + at, .bytes = bytes, .device = card_, .kind = MemoryKind::kDevice};
    }
    void leak() { memory_.leak(); }

   private:
    device::DeviceMemory memory_;
    int16_t card_;
};

// One object of the tests: pieces of some memory on a card and on the host, in any order.
struct Scattered {
    std::string name;
    std::vector<MemoryRef> parts;

    PutItem put() const { return {name, {}, parts}; }
    GetItem get() const { return {name, parts}; }
};

std::vector<unsigned char> bytes_of(std::span<const MemoryRef> parts) {
    std::vector<unsigned char> all;
    for (const MemoryRef& part : parts) {
        auto* at = part.kind == MemoryKind::kDevice
                       ? reinterpret_cast<unsigned char*>(soft_device().soft_at(part.address, part.bytes))
                       : reinterpret_cast<unsigned char*>(part.data());
        all.insert(all.end(), at, at + part.bytes);
    }
    return all;
}

// Objects of 24 pieces of 4 KiB each: two of three lie on the card, no two neighbours of an object side by
// side; every fifth object lies on the host alone.
constexpr uint64_t kPiece = 4096;
constexpr size_t kPieces = 24;

std::vector<Scattered> scattered(size_t n, const OnCard& card, std::vector<unsigned char>& host) {
    std::vector<Scattered> objects;
    for (size_t i = 0; i < n; ++i) {
        Scattered& object = objects.emplace_back();
        object.name = "object " + std::to_string(i);
        for (size_t k = 0; k < kPieces; ++k) {
            const uint64_t at = (k * n + i) * kPiece;
            if (i % 5 == 4 || k % 3 == 2) {
                object.parts.push_back(MemoryRef::host(&host[at], kPiece));
            } else {
                object.parts.push_back(card.part(at, kPiece));
            }
        }
    }
    return objects;
}

std::vector<PutItem> puts(const std::vector<Scattered>& objects) {
    std::vector<PutItem> items;
    for (const Scattered& object : objects) items.push_back(object.put());
    return items;
}

std::vector<GetItem> gets(const std::vector<Scattered>& objects) {
    std::vector<GetItem> items;
    for (const Scattered& object : objects) items.push_back(object.get());
    return items;
}

void remove_all(Client& client, const std::vector<Scattered>& objects) {
    for (const Scattered& object : objects)
        REQUIRE(client.remove(std::vector{std::string_view(object.name)}));
}

}  // namespace

TEST_CASE("card objects: pieces on a card and on the host become objects, and objects such pieces") {
    if (is_real()) return;  // the tests look at the card's memory
    Node node;
    each_policy([&](Bed& bed) {
        Random random(4100);
        {
            Client client(node.options());
            constexpr size_t kObjects = 260;  // of 64 KiB on the card: 2 slots and a part of one
            constexpr uint64_t kBytes = kObjects * kPieces * kPiece;
            OnCard from(bed.device, kBytes), to(bed.device, kBytes);
            std::vector<unsigned char> host_from(kBytes), host_to(kBytes);
            from.fill(random);
            fill_with(random, host_from);
            std::vector<Scattered> saved = scattered(kObjects, from, host_from);
            std::vector<Scattered> loaded = scattered(kObjects, to, host_to);

            PutReport report = device::must(client.put(puts(saved), {}));
            REQUIRE(report.outcomes.size() == kObjects);
            for (PutOutcome outcome : report.outcomes) CHECK(outcome == PutOutcome::kStored);
            CHECK(report.stored_bytes == kBytes);
            loaded[7].name = "no such object";
            std::vector<unsigned char> untouched = bytes_of(loaded[7].parts);
            std::vector<int64_t> sizes = device::must(client.get(gets(loaded), true));
            REQUIRE(sizes.size() == kObjects);
            for (size_t i = 0; i < kObjects; ++i) {
                if (i == 7) continue;
                CHECK(sizes[i] == static_cast<int64_t>(kPieces * kPiece));
                CHECK(bytes_of(loaded[i].parts) == bytes_of(saved[i].parts));
            }
            CHECK(sizes[7] == kMiss);
            CHECK(bytes_of(loaded[7].parts) == untouched);

            // Pinned, in another order, and by another client.
            Client other(node.options());
            std::vector<std::string_view> names{saved[3].name, "no such object", saved[1].name};
            moonpool::Pinned held = device::must(other.pin(names));
            std::vector<size_t> places{2, kNotPinned, 0};
            std::vector<GetItem> items{loaded[20].get(), loaded[21].get(), loaded[22].get()};
            sizes = device::must(other.get_pinned(held, places, items, false));
            CHECK(sizes == std::vector<int64_t>{kPieces * kPiece, kMiss, kPieces * kPiece});
            CHECK(bytes_of(loaded[20].parts) == bytes_of(saved[1].parts));
            CHECK(bytes_of(loaded[22].parts) == bytes_of(saved[3].parts));
            remove_all(client, saved);
        }
        bed.end();
    });
}

TEST_CASE(
    "card objects: one larger than a slot goes in pieces, and a buffer larger than its object is kept") {
    if (is_real()) return;
    Node node;
    each_policy([&](Bed& bed) {
        Random random(4200);
        {
            Client client(node.options());
            constexpr uint64_t kLarge = kRingSlot + kRingSlot / 2 + 4096;
            OnCard from(bed.device, 2 * kLarge), to(bed.device, 2 * kLarge);
            from.fill(random);
            to.fill(random);
            std::vector<unsigned char> head(1000, 7), head_to(1000);
            // A small one on either side: it is in no group with the large one.
            std::vector<Scattered> saved{
                {"small", {from.part(0, 4096)}},
                {"large",
                 {from.part(kLarge, kLarge / 2), MemoryRef::host(head.data(), head.size()),
                  from.part(4096, kLarge / 2)}},
                {"last", {from.part(8192, 512)}},
            };
            std::vector<Scattered> loaded{
                {"small", {to.part(0, 1024), to.part(65536, 8192)}},
                {"large",
                 {to.part(131072, kLarge / 2), MemoryRef::host(head_to.data(), head_to.size()),
                  to.part(kLarge, kLarge)}},
                {"last", {to.part(1024, 512)}},
            };
            REQUIRE(device::must(client.put(puts(saved), {})).refusal == "");
            std::vector<unsigned char> before = bytes_of(loaded[1].parts), small = bytes_of(loaded[0].parts);
            std::vector<int64_t> sizes = device::must(client.get(gets(loaded), false));
            CHECK(sizes == std::vector<int64_t>{4096, static_cast<int64_t>(kLarge / 2 * 2 + 1000), 512});
            for (size_t i = 0; i < 3; ++i) {
                std::vector<unsigned char> there = bytes_of(loaded[i].parts),
                                           truth = bytes_of(saved[i].parts);
                CHECK(std::equal(truth.begin(), truth.end(), there.begin()));
                const std::vector<unsigned char>& old = i == 0 ? small : before;
                if (i == 2) continue;
                CHECK(std::equal(there.begin() + sizes[i], there.end(), old.begin() + sizes[i]));
            }
            // Too small: nothing is written.
            std::vector<Scattered> tight{{"last", {to.part(1024, 511)}}};
            std::vector<unsigned char> kept = bytes_of(tight[0].parts);
            CHECK(client.get(gets(tight), false).error().code == Code::kInvalidArgument);
            CHECK(bytes_of(tight[0].parts) == kept);
            remove_all(client, saved);
        }
        bed.end();
    });
}

TEST_CASE("card objects: parts of one object on two cards") {
    if (is_real()) return;
    Node node;
    Random random(4300);
    for (Policy policy : {Policy::kLate, Policy::kEarly, Policy::kShuffled}) {
        Bed bed(policy, random.next());
        soft_device().soft_set_cards(2);
        {
            Client client(node.options());
            std::shared_ptr<device::Device> second = device::must(device::Device::open(1));
            OnCard a(bed.device, 65536), b(second, 65536);
            a.fill(random);
            b.fill(random);
            std::vector<Scattered> saved{{"both", {a.part(0, 5000), b.part(100, 3000), a.part(9000, 64)}}};
            std::vector<Scattered> loaded{
                {"both", {b.part(20000, 5000), a.part(30000, 3000), b.part(40000, 64)}}};
            REQUIRE(device::must(client.put(puts(saved), {})).refusal == "");
            CHECK(device::must(client.get(gets(loaded), true)) == std::vector<int64_t>{8064});
            CHECK(bytes_of(loaded[0].parts) == bytes_of(saved[0].parts));
            remove_all(client, saved);
        }
        bed.end();
    }
}

TEST_CASE("card objects: a wrong name stores nothing of a call of several slots") {
    if (is_real()) return;
    Node node;
    Bed bed;
    {
        Client client(node.options());
        OnCard card(bed.device, kRingSlot);
        std::vector<Scattered> objects{{"one", {card.part(0, kRingSlot)}},
                                       {"two", {card.part(0, kRingSlot)}},
                                       {"", {card.part(0, 4096)}}};
        CHECK(client.put(puts(objects), {}).error().code == Code::kInvalidArgument);
        std::vector<std::string_view> names{"one", "two"};
        CHECK(device::must(client.exists(names)) == std::vector(2, Presence::kMiss));
    }
    bed.end();
}

TEST_CASE("card objects: a card that dies, hangs or refuses costs the call an error and not its node") {
    if (is_real()) return;
    Node node;
    ClientOptions options = node.options();
    options.timeout_ms = 400;
    for (bool put : {true, false}) {
        for (std::string fate : {"dies", "hangs", "pins nothing"}) {
            CAPTURE(put);
            CAPTURE(fate);
            Bed bed;
            {
                Client client(options), wellWishing(node.options());
                OnCard card(bed.device, 4 * kRingSlot);
                std::vector<unsigned char> host(100, 1);
                std::vector<Scattered> at_home{{"host " + fate, {MemoryRef::host(host.data(), host.size())}}};
                std::vector<Scattered> objects{{"a", {card.part(0, kRingSlot)}},
                                               {"b", {card.part(kRingSlot, kRingSlot)}}};
                if (!put) {
                    REQUIRE(wellWishing.put(puts(objects), {}));
                    wellWishing.close();
                }
                if (fate == "dies") soft_device().soft_die(1, 700);
                if (fate == "hangs") soft_device().soft_hang(1);
                if (fate == "pins nothing") soft_device().soft_limit(UINT64_MAX, 1 << 20);
                for (int again = 0; again < 2; ++again) {
                    Error error = put ? client.put(puts(objects), {}).error()
                                      : client.get(gets(objects), false).error();
                    CAPTURE(error.text);
                    CHECK(error.code == Code::kOs);
                    CHECK(error.text.find("memory of CUDA card 0: ") == 0);
                }
                REQUIRE(device::must(client.put(puts(at_home), {})).refusal == "");
                CHECK(device::must(client.get(gets(at_home), true)) == std::vector<int64_t>{100});
                remove_all(client, at_home);
                if (put) {
                    std::vector<std::string_view> names{"a", "b"};
                    CHECK(device::must(client.exists(names)) == std::vector(2, Presence::kMiss));
                } else {
                    remove_all(client, objects);
                }
                soft_device().soft_unhang();
                soft_device().soft_settle();
                device::CardCopier::collect_all();
                if (fate == "dies") card.leak();
            }
            fate == "dies" ? bed.forget() : bed.end();
        }
    }
}

TEST_CASE("card objects: threads with two slots between them wait for none for ever") {
    if (is_real()) return;
    Node node;
    Random random(4400);
    for (Policy policy : {Policy::kLate, Policy::kShuffled}) {
        Bed bed(policy, random.next());
        soft_device().soft_limit(UINT64_MAX, 2 * kRingSlot);
        {
            Client client(node.options());
            OnCard from(bed.device, 3 * kRingSlot);
            from.fill(random);
            auto run = [&](unsigned number) {
                OnCard to(bed.device, 3 * kRingSlot);
                std::vector<Scattered> saved, loaded;
                for (unsigned i = 0; i < 3; ++i) {
                    std::string name = std::to_string(number) + " " + std::to_string(i);
                    saved.push_back({name, {from.part(i * kRingSlot + number, kRingSlot - 100)}});
                    loaded.push_back({name, {to.part(i * kRingSlot, kRingSlot - 100)}});
                }
                for (int again = 0; again < 2; ++again) {
                    CHECK(device::must(client.put(puts(saved), {.replace = true})).refusal == "");
                    device::must(client.get(gets(loaded), false));
                    for (unsigned i = 0; i < 3; ++i)
                        CHECK(bytes_of(loaded[i].parts) == bytes_of(saved[i].parts));
                }
                remove_all(client, saved);
            };
            std::vector<std::thread> threads;
            for (unsigned number = 0; number < 2; ++number) threads.emplace_back(run, number);
            for (std::thread& thread : threads) thread.join();
        }
        bed.end();
    }
}

TEST_CASE("card objects: the driver is asked once for each allocation of a call") {
    if (is_real()) return;
    Bed bed;
    {
        OnCard card(bed.device, 1 << 20);
        std::vector<char> host(4096);
        const uint64_t at = card.part(0, 1).address;
        const int before = soft_device().soft_calls("cuPointerGetAttributes");
        MemoryKinds kinds;
        for (uint64_t i = 0; i < 1000; ++i) {
            MemoryRef ref = device::must(kinds.describe(at + i * 1000, 1000));
            CHECK(ref.kind == MemoryKind::kDevice);
            CHECK(ref.device == 0);
            CHECK(ref.address == at + i * 1000);
            CHECK(ref.bytes == 1000);
        }
        CHECK(soft_device().soft_calls("cuPointerGetAttributes") == before + 2);
        CHECK(device::must(kinds.describe(reinterpret_cast<uint64_t>(host.data()), 4096)).kind ==
              MemoryKind::kHost);
        CHECK(kinds.describe(at, 2 << 20).error().code == Code::kInvalidArgument);
        CHECK(kinds.describe(at + 1000, 2 << 20).error().code == Code::kInvalidArgument);
    }
    bed.end();
}
