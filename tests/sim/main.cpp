// The simulator as a program, to look for findings beyond the seeds of CI and to measure its speed:
//   make -C tests/native sim && build/native-tests/sim/simulator seeds=1000 apart_ms=300 restarts=2 disks=1
// Prints operations a second of one core and the first finding; exit status 1 where there is one.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <string>

#include "cluster.hpp"

using namespace moonpool::sim;

int main(int argc, char** argv) {
    Conditions c;
    Planted planted;
    uint64_t first = 1, seeds = 100, apart_ms = 0, lasts_ms = c.lasts / kMs, for_ever_only = 0;
    std::map<std::string, uint64_t*> wide{{"first", &first},
                                          {"seeds", &seeds},
                                          {"apart_ms", &apart_ms},
                                          {"lasts_ms", &lasts_ms},
                                          {"for_ever_only", &for_ever_only}};
    std::map<std::string, uint32_t*> narrow{{"hosts", &c.hosts},
                                            {"ranges", &c.ranges},
                                            {"keys", &c.keys},
                                            {"puts", &c.puts},
                                            {"operations", &c.operations},
                                            {"gets", &c.gets},
                                            {"replaces", &c.replaces},
                                            {"removes", &c.removes},
                                            {"pins", &c.pins},
                                            {"uniques", &c.uniques},
                                            {"restarts", &c.restarts},
                                            {"stops", &c.stops},
                                            {"cuts", &c.cuts},
                                            {"broken_links", &c.broken_links},
                                            {"jumps", &c.clock_jumps},
                                            {"master_restarts", &c.master_restarts},
                                            {"standby_restarts", &c.standby_restarts},
                                            {"hand_overs", &c.hand_overs},
                                            {"full", &c.full},
                                            {"memory_objects", &c.memory_objects},
                                            {"slow_disk", &c.disk.slow_ms},
                                            {"disk_fails", &c.disk.fails},
                                            {"disk_full", &c.disk.full},
                                            {"stripes", &c.stripes},
                                            {"clients", &c.client_restarts}};
    std::map<std::string, bool*> flags{{"disks", &c.disks},
                                       {"torn", &c.disk.torn},
                                       {"one_writer", &c.one_writer},
                                       {"plant_drop_lost", &planted.drop_lost},
                                       {"plant_pin_lost", &planted.pin_lost},
                                       {"plant_removal_lost", &planted.removal_lost},
                                       {"plant_unpin_lost", &planted.unpin_lost},
                                       {"plant_replace_lost", &planted.replace_lost},
                                       {"plant_rows_lost", &planted.rows_lost},
                                       {"plant_all_told", &planted.all_told},
                                       {"plant_handover_lost", &planted.handover_lost},
                                       {"plant_standby_late", &planted.standby_late},
                                       {"plant_older_taken", &planted.older_taken},
                                       {"plant_put_anew", &planted.put_anew},
                                       {"plant_one_told", &planted.one_told},
                                       {"plant_applied_early", &planted.applied_early},
                                       {"plant_tail_early", &planted.tail_early},
                                       {"plant_write_survives", &planted.write_survives},
                                       {"plant_term_ignored", &planted.term_ignored},
                                       {"plant_unique", &planted.unique_believes_itself},
                                       {"plant_two_ranges", &planted.two_ranges},
                                       {"plant_versions_mixed", &planted.versions_mixed},
                                       {"plant_stripes_mixed", &planted.stripes_mixed},
                                       {"plant_stripes_left", &planted.stripes_left},
                                       {"plant_stripes_unpinned", &planted.stripes_unpinned},
                                       {"plant_stripes_unasked", &planted.stripes_unasked},
                                       {"plant_stripes_overtaken", &planted.stripes_overtaken},
                                       {"plant_stripes_later", &planted.stripes_later},
                                       {"plant_stripes_unremoved", &planted.stripes_unremoved},
                                       {"standby", &c.standby},
                                       {"owner_stops", &c.owner_stops},
                                       {"owner_dies", &c.owner_dies}};
    for (int i = 1; i < argc; ++i) {
        const char* equals = std::strchr(argv[i], '=');
        std::string name =
            equals == nullptr ? argv[i] : std::string(static_cast<const char*>(argv[i]), equals);
        uint64_t value = equals == nullptr ? 1 : std::strtoull(equals + 1, nullptr, 10);
        if (wide.contains(name)) {
            *wide[name] = value;
        } else if (narrow.contains(name)) {
            *narrow[name] = static_cast<uint32_t>(value);
        } else if (flags.contains(name)) {
            *flags[name] = value != 0;
        } else {
            std::fprintf(stderr, "there is no %s; there are:", name.c_str());
            for (auto& [known, to] : wide) std::fprintf(stderr, " %s", known.c_str());
            for (auto& [known, to] : narrow) std::fprintf(stderr, " %s", known.c_str());
            for (auto& [known, to] : flags) std::fprintf(stderr, " %s", known.c_str());
            std::fprintf(stderr, "\n");
            return 2;
        }
    }
    c.apart = apart_ms * kMs;
    c.lasts = lasts_ms * kMs;
    std::clock_t begin = std::clock();  // of this process: others may have the core
    Search found = search(first, seeds, c, planted,
                          [&](const Finding& finding) { return for_ever_only == 0 || finding.for_ever; });
    double took = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    std::printf("%lu histories, %lu operations, %.0f operations a second\n", found.seeds, found.operations,
                static_cast<double>(found.operations) / took);
    if (found.seed) std::printf("%s\n", explain(*found.seed, found.plan, found.report).c_str());
    return found.seed ? 1 : 0;
}
