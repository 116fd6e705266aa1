# What commands in the guest may use.

# So many pairs of network cards with soft RoCE, a0 and b0 and so on, joined by a cable each: devices ra0 and rb0, addresses
# 10.8.0.1 and 10.8.0.2. Both ends are this machine's; rules make the traffic between them take the cable. $2: the MTU of the
# cards. Soft RoCE has 64 packets under way: where a rail is slowed down, smaller ones, or the wait for an answer outlasts the
# time after which they are sent again, and no answer counts any more.
rails() {
    modprobe veth; modprobe rdma_rxe; modprobe ib_uverbs
    sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0 net.ipv4.conf.all.accept_local=1 \
        net.ipv4.conf.all.arp_ignore=1
    ip rule add pref 100 lookup local; ip rule del pref 0
    local i near far mtu=${2:-9000}
    for ((i = 0; i < $1; i++)); do
        near=10.8.$i.1 far=10.8.$i.2
        ip link add a$i mtu $mtu type veth peer name b$i mtu $mtu
        ip address add $near/24 dev a$i; ip address add $far/24 dev b$i
        ip link set a$i up; ip link set b$i up
        sysctl -qw net.ipv4.conf.a$i.rp_filter=0 net.ipv4.conf.b$i.rp_filter=0
        ip rule add pref 5 iif a$i lookup local; ip rule add pref 5 iif b$i lookup local
        ip route add 10.8.$i.0/24 dev a$i src $near table $((200 + 2 * i))
        ip route add 10.8.$i.0/24 dev b$i src $far table $((201 + 2 * i))
        ip rule add pref 10 from $near to $far lookup $((200 + 2 * i))
        ip rule add pref 10 from $far to $near lookup $((201 + 2 * i))
        rdma link add ra$i type rxe netdev a$i
        rdma link add rb$i type rxe netdev b$i
    done
}

# The card of the line between two machines, eth0, with soft RoCE, rxe0. $1: the number of this machine, which makes its
# addresses.
line() {
    modprobe virtio_net; modprobe rdma_rxe; modprobe ib_uverbs
    wait_for_file /sys/class/net/eth0 || return
    ip link set eth0 address 52:54:00:00:00:0$1 mtu 4200 up && ip address add 10.9.0.$1/24 dev eth0
    rdma link add rxe0 type rxe netdev eth0
}

# Waits up to 30 s for a file.
wait_for_file() {
    local i
    for ((i = 0; i < 300; i++)); do
        [ -e "$1" ] && return
        sleep 0.1
    done
    echo "there is no $1"
    return 1
}

# Turns the persistent memory of the machine into /dev/dax0.0, as ndctl does.
dax_device() {
    modprobe -a nd_e820 nd_pmem dax_pmem device_dax
    wait_for_file /dev/pmem0 || return
    local nd=/sys/bus/nd dax
    echo namespace0.0 > $nd/drivers/nd_pmem/unbind
    dax=$(cat $nd/devices/region0/dax_seed)
    cat /proc/sys/kernel/random/uuid > $nd/devices/$dax/uuid
    echo ram > $nd/devices/$dax/mode
    echo 2097152 > $nd/devices/$dax/align
    echo namespace0.0 > $nd/devices/$dax/namespace
    echo $dax > $nd/drivers/dax_pmem/bind
    wait_for_file /dev/dax0.0
}

# A file of so many MiB at the path $1 in memory as the block device /dev/nvme0n1, by NVMe over fabrics to this machine itself:
# over TCP, or, with rdma as $3, over RDMA by the first rail.
nvme_over_fabrics() {
    local transport=${3:-tcp} near= far=127.0.0.1
    [ $transport = rdma ] && near=,host_traddr=10.8.0.1 far=10.8.0.2
    modprobe -a configfs nvmet nvmet-$transport nvme-$transport
    mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
    truncate -s "$2"M "$1"
    local nvmet=/sys/kernel/config/nvmet name=nqn.2026-01.test:vm
    local subsystem=$nvmet/subsystems/$name port=$nvmet/ports/1
    mkdir $subsystem $subsystem/namespaces/1 $port
    echo 1 > $subsystem/attr_allow_any_host
    echo -n "$1" > $subsystem/namespaces/1/device_path
    echo 1 > $subsystem/namespaces/1/buffered_io # memory has no O_DIRECT on this kernel
    echo 1 > $subsystem/namespaces/1/enable
    echo ipv4 > $port/addr_adrfam; echo $transport > $port/addr_trtype
    echo $far > $port/addr_traddr; echo 4420 > $port/addr_trsvcid
    ln -s $subsystem $port/subsystems/
    echo "transport=$transport,traddr=$far$near,trsvcid=4420,nqn=$name,nr_io_queues=1" > /dev/nvme-fabrics
    wait_for_file /dev/nvme0n1
}
