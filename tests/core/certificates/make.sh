#!/bin/sh
# Makes the certificates beside it anew, all with test-key.pem, valid from 2020 to 2120; needs openssl. The
# authority's own key is thrown away.
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

authority() { # name
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "$work/$1.key" \
        -subj "/CN=moonpool test, $1" -out "$work/$1.pem" 2>/dev/null
    : > "$work/$1.db"
    openssl req -new -key "$work/$1.key" -subj "/CN=moonpool test, $1" -out "$work/$1.csr"
    sign "$1" "$1" 20200101000000Z 21200101000000Z "basicConstraints=critical,CA:TRUE" -selfsign
    mv "$work/out-$1.pem" "$work/$1.pem"
}
sign() { # name, authority, from, to, extension, options
    name=$1 by=$2 from=$3 to=$4 extension=$5
    shift 5
    cat > "$work/ca.cnf" <<END
[ca]
default_ca = it
[it]
database = $work/$by.db
new_certs_dir = $work
rand_serial = yes
default_md = sha256
policy = any
unique_subject = no
email_in_dn = no
[any]
commonName = supplied
[extensions]
$extension
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
END
    openssl ca -batch -notext -config "$work/ca.cnf" -extensions extensions -in "$work/$name.csr" \
        -cert "$work/$by.pem" -keyfile "$work/$by.key" -startdate "$from" -enddate "$to" \
        -out "$work/out-$name.pem" "$@" 2>/dev/null
}
leaf() { # name, subject alternative names, from, to
    openssl req -new -key test-key.pem -subj "/CN=moonpool test, $1" -out "$work/$1.csr"
    sign "$1" authority "$3" "$4" "subjectAltName=$2"
    mv "$work/out-$1.pem" "$1.pem"
}
common_name() { # name: of localhost, which it has as subject alone; signed by itself
    cp test-key.pem "$work/$1.key"
    openssl req -x509 -key test-key.pem -subj /CN=localhost -out "$work/$1.pem"
    openssl req -new -key test-key.pem -subj /CN=localhost -out "$work/$1.csr"
    : > "$work/$1.db"
    sign "$1" "$1" 20200101000000Z 21200101000000Z "basicConstraints=critical,CA:TRUE" -selfsign
    mv "$work/out-$1.pem" "$1.pem"
}

authority authority
leaf master "DNS:localhost,IP:127.0.0.1,IP:::1" 20200101000000Z 21200101000000Z
leaf master-elsewhere "DNS:master.example" 20200101000000Z 21200101000000Z
leaf master-expired "DNS:localhost,IP:127.0.0.1,IP:::1" 20200101000000Z 20210101000000Z
leaf master-future "DNS:localhost,IP:127.0.0.1,IP:::1" 21190101000000Z 21200101000000Z
leaf caller "DNS:node.example" 20200101000000Z 21200101000000Z
mv "$work/authority.pem" authority.pem
common_name common-name
