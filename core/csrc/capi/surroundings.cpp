#include "capi/surroundings.hpp"

#include <arpa/inet.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

namespace moonpool::capi {

namespace {

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

std::string runtime_folder() {
    if (std::string folder = variable("MOONPOOL_RUNTIME_DIR"); !folder.empty()) return folder;
    if (::geteuid() == 0) return "/run/moonpool";
    if (std::string folder = variable("XDG_RUNTIME_DIR"); !folder.empty()) return folder + "/moonpool";
    return "/tmp/moonpool-" + std::to_string(::geteuid());
}

// The folder belongs to this user alone, else another user could have put the token there.
bool is_private(const std::string& folder) {
    struct stat info {};
    return ::lstat(folder.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == ::geteuid() &&
           (info.st_mode & 077) == 0;
}

}  // namespace

Result<Token> cluster_token() {
    std::string text = variable("MOONPOOL_CLUSTER_TOKEN"), path = variable("MOONPOOL_CLUSTER_TOKEN_FILE");
    if (!text.empty() && !path.empty()) {
        return Error{
            Code::kInvalidArgument,
            "both MOONPOOL_CLUSTER_TOKEN and MOONPOOL_CLUSTER_TOKEN_FILE are set; unset one of them"};
    }
    bool chosen = !text.empty() || !path.empty();
    std::string folder = runtime_folder();
    std::string shared = folder + "/token";
    if (!chosen && (!is_private(folder) || ::access(shared.c_str(), F_OK) != 0)) {
        return Error{
            Code::kAuth,
            "there is no cluster token: set MOONPOOL_CLUSTER_TOKEN_FILE to a file with one, the same "
            "for all engines, or start a moonpool node on this host"};
    }
    Result<Secrets> secrets = !text.empty() ? Secrets::of_text(text, "the variable MOONPOOL_CLUSTER_TOKEN")
                                            : Secrets::of_file(chosen ? path : shared);
    if (!secrets) return secrets.error();
    return Token{std::move(*secrets), chosen};
}

Result<DataTls> data_tls() {
    const std::string mode = variable("MOONPOOL_CLUSTER_TLS_DATA");
    if (mode.empty() || mode == "off") return DataTls{};
    if (mode != "on" && mode != "mutual") {
        return Error{Code::kInvalidArgument,
                     "MOONPOOL_CLUSTER_TLS_DATA is \"" + mode + "\"; it is off, on or mutual"};
    }
    const bool mutual = mode == "mutual";
    TlsFiles own{variable("MOONPOOL_CLUSTER_TLS_CERT"), variable("MOONPOOL_CLUSTER_TLS_KEY"),
                 variable("MOONPOOL_CLUSTER_TLS_CA"), &kDataTls};
    if (own.cert.empty() || own.key.empty()) {
        return Error{Code::kInvalidArgument, "cluster.tls_data is \"" + mode +
                                                 "\" and the transfer engine has no certificate to show; set "
                                                 "MOONPOOL_CLUSTER_TLS_CERT and MOONPOOL_CLUSTER_TLS_KEY"};
    }
    if (mutual && own.ca.empty()) {
        return Error{
            Code::kInvalidArgument,
            "cluster.tls_data is \"mutual\" and MOONPOOL_CLUSTER_TLS_CA is empty; name the authorities "
            "that vouch for other engines"};
    }
    if (Status status = check_key(own); !status) return status.error();
    // The program has no log of ours.
    own.tell = [](const std::string& trouble) { std::fprintf(stderr, "moonpool: %s\n", trouble.c_str()); };
    TlsFiles shown = own, seen = own;
    if (!mutual) {
        shown.ca.clear();
        seen.cert.clear();
        seen.key.clear();
    }
    Result<std::shared_ptr<TlsServer>> server = TlsServer::create(shown);
    if (!server) return server.error();
    Result<std::shared_ptr<TlsClient>> client =
        TlsClient::create(seen, variable("MOONPOOL_CLUSTER_TLS_DATA_NAME"));
    if (!client) return client.error();
    return DataTls{std::move(*server), std::move(*client)};
}

bool is_loopback(const std::string& host) {
    in_addr number{};
    if (::inet_pton(AF_INET, host.c_str(), &number) == 1) return (ntohl(number.s_addr) >> 24) == 127;
    return host == "localhost" || host == "::1";
}

}  // namespace moonpool::capi
