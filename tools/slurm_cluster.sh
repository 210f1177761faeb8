#!/usr/bin/env bash
# A real Slurm cluster on this machine: slurmctld, four virtual nodes, munge, and if asked for slurmdbd with MariaDB.
#
#     tools/slurm_cluster.sh start [--with-accounting]    # idempotent; installs what is missing (Debian, apt)
#     tools/slurm_cluster.sh status                       # exit code 0 when it is up
#     tools/slurm_cluster.sh fail-node NODE               # power failure: kills slurmd, steps and all processes
#     tools/slurm_cluster.sh fail-slurmd NODE             # kills only slurmd: the jobs run on, Slurm requeues them
#     tools/slurm_cluster.sh restore-node NODE
#     tools/slurm_cluster.sh stop [--wipe]                # cancels all jobs; --wipe removes the cluster's files too
#     eval "$(tools/slurm_cluster.sh env)"                # SLURM_CONF, for sbatch and hpc-es
#
# It must be root; it needs neither systemd nor cgroups; everything listens on loopback only and lives below
# HPC_ES_SLURM_ROOT. Partitions: `batch`, which `high` preempts (requeue, 10 s of grace after the job's own signal).
# Every node has 4 CPUs and 2 fake GPUs, on any machine. Timers are short, so tests of failures are fast.
# Invariant: only processes named by this cluster's own pid files, or found on its own nodes, are ever signalled.

set -Eeuo pipefail

root=${HPC_ES_SLURM_ROOT:-/var/lib/hpc-es-slurm}
port=${HPC_ES_SLURM_PORT:-17400} # controller; nodes follow, then slurmdbd at +90 and MariaDB at +91
nodes=4
export SLURM_CONF=$root/etc/slurm.conf
munge_socket=$root/munge/munge.socket

trap 'printf "error: %s, line %s: %s; logs are in %s\n" "$0" "$LINENO" "$BASH_COMMAND" "$root/log" >&2' ERR
say() { printf '[slurm] %s\n' "$*" >&2; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# alive PIDFILE NAME: the process of that pid file lives and its command line holds NAME.
alive() {
    local pid
    pid=$(cat "$1" 2>/dev/null) && [[ $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null) == *"$2"* ]]
}

# within SECONDS COMMAND...: repeat until it succeeds.
within() {
    local end=$((SECONDS + $1))
    shift
    until timeout 10 "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || return 1
        sleep 0.1
    done
}

listens() { timeout 1 bash -c "</dev/tcp/127.0.0.1/$1" 2>/dev/null; }
export -f listens

node_names() { seq -f 'node%g' "$nodes"; }
slurmd_pid() { echo "$root/run/slurmd.$1.pid"; }
is_node() { node_names | grep -qxF -- "$1" || fail "$1 is none of the nodes $(node_names | xargs)"; }

install_packages() {
    local wanted=(slurmctld slurmd slurm-client munge procps) missing=() package
    ((accounting)) && wanted+=(slurmdbd mariadb-server-core mariadb-client-core)
    for package in "${wanted[@]}"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    command -v apt-get >/dev/null || fail "install these packages first: ${missing[*]}"
    say "installing ${missing[*]}"
    local policy=/usr/sbin/policy-rc.d made=0 # keeps the packages' own services from starting
    [[ -e $policy ]] || { printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy && made=1; }
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null
    ((made == 0)) || rm $policy
}

# The daemons bind to what the host's name resolves to.
check_host_name() {
    local name
    for name in "$(hostname -s)" "$(hostname)"; do
        getent hosts "$name" >/dev/null || echo "127.0.0.1 $name" >>/etc/hosts
        [[ $(getent ahostsv4 "$name" | awk 'NR == 1 {print $1}') == 127.* ]] ||
            fail "$name must resolve to 127.0.0.1, so that the cluster is reachable from this machine only: see /etc/hosts"
    done
}

slurm_conf() {
    local host
    host=$(hostname -s)
    cat <<CONF
ClusterName=hpc-es
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# a requeued job also waits for cred_expire; with 1 s, jobs fail to start
AuthInfo=socket=$munge_socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation=$root/state
SlurmdSpoolDir=$root/spool/%n
SlurmctldPidFile=$root/run/slurmctld.pid
SlurmdPidFile=$(slurmd_pid %n)
SlurmctldLogFile=$root/log/slurmctld.log
SlurmdLogFile=$root/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
MpiDefault=none
MailProg=/bin/true
SwitchType=switch/none
SelectType=select/cons_tres
# the least loaded node first, so that two workers run on two nodes
SelectTypeParameters=CR_Core,CR_LLN
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=100000,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
KillWait=5
SlurmdTimeout=5
SlurmctldTimeout=10
MessageTimeout=5
TCPTimeout=2
InactiveLimit=0
CompleteWait=0
MinJobAge=3600
ReturnToService=1
JobCompType=jobcomp/none
$(if ((accounting)); then
        echo AccountingStorageType=accounting_storage/slurmdbd
        echo AccountingStorageHost=127.0.0.1
        echo AccountingStoragePort=$((port + 90))
        echo AccountingStoragePass="$munge_socket"
    else
        echo AccountingStorageType=accounting_storage/none
    fi)
# nodes have more than the machine has
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=4 RealMemory=16000 Gres=gpu:2 State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=10 MaxTime=1-00:00:00 DefaultTime=60 State=UP
PartitionName=high Nodes=ALL Default=NO PriorityTier=10 PreemptMode=OFF MaxTime=1-00:00:00 DefaultTime=60 State=UP
CONF
}

slurmdbd_conf() {
    cat <<CONF
AuthType=auth/munge
AuthInfo=socket=$munge_socket
DbdHost=$(hostname -s)
DbdAddr=127.0.0.1
DbdPort=$((port + 90))
CommunicationParameters=NoInAddrAny
SlurmUser=root
PidFile=$root/run/slurmdbd.pid
LogFile=$root/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((port + 91))
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
CommitDelay=1
CONF
}

write_files() {
    umask 022
    mkdir -p "$root"/{etc,munge,run,log,state,mariadb}
    node_names | xargs -I{} mkdir -p "$root/spool/{}"
    [[ -s $root/munge/munge.key ]] || (umask 077 && head -c 128 /dev/urandom >"$root/munge/munge.key")
    slurm_conf >"$SLURM_CONF"
    (umask 077 && slurmdbd_conf >"$root/etc/slurmdbd.conf")
    local gpu # device nodes like /dev/null stand in for the cards
    for gpu in 0 1; do
        [[ -c $root/run/gpu$gpu ]] || mknod "$root/run/gpu$gpu" c 1 3
    done
    printf 'AutoDetect=off\nNodeName=node[1-%s] Name=gpu File=%s/run/gpu[0-1]\n' "$nodes" "$root" >"$root/etc/gres.conf"
}

start_munge() {
    alive "$root/munge/munged.pid" munged || munged --key-file="$root/munge/munge.key" --socket="$munge_socket" \
        --pid-file="$root/munge/munged.pid" --log-file="$root/munge/munged.log" --seed-file="$root/munge/munged.seed"
    within 10 munge -n -S "$munge_socket" || fail "munged does not answer; see $root/munge/munged.log"
}

start_database() {
    local options=(--no-defaults --user=root --datadir="$root/mariadb/data")
    if [[ ! -d $root/mariadb/data/mysql ]]; then
        say "making the database"
        mkdir -p "$root/mariadb/data"
        mariadb-install-db "${options[@]}" --auth-root-authentication-method=normal --skip-test-db \
            >"$root/log/mariadb-install.log" 2>&1
    fi
    if ! alive "$root/mariadb/mariadbd.pid" mariadbd; then
        cat >"$root/mariadb/init.sql" <<'SQL'
CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS 'slurm'@'%' IDENTIFIED BY 'slurm';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'%';
SQL
        setsid mariadbd "${options[@]}" --bind-address=127.0.0.1 --port=$((port + 91)) --skip-name-resolve \
            --socket="$root/mariadb/socket" --pid-file="$root/mariadb/mariadbd.pid" --log-error="$root/log/mariadbd.log" \
            --init-file="$root/mariadb/init.sql" --innodb-buffer-pool-size=64M --innodb-log-file-size=16M \
            --innodb-lock-wait-timeout=900 --innodb-flush-log-at-trx-commit=0 </dev/null >/dev/null 2>&1 &
        within 60 bash -c "listens $((port + 91))" || fail "MariaDB does not answer; see $root/log/mariadbd.log"
    fi
}

start_accounting() {
    start_database
    alive "$root/run/slurmdbd.pid" slurmdbd || slurmdbd
    within 60 sacctmgr -n show cluster || fail "slurmdbd does not answer; see $root/log/slurmdbd.log"
    [[ -n $(sacctmgr -n -P show cluster hpc-es) ]] || sacctmgr -i -Q add cluster hpc-es >/dev/null
}

start_node() {
    alive "$(slurmd_pid "$1")" "slurmd -N $1" || slurmd -N "$1"
}

num_ready() { sinfo -h -N -p batch -o %T | grep -cE '^(idle|mixed|allocated|completing)$' || true; } # a * would mean silent

start() {
    [[ $EUID == 0 ]] || fail "the cluster can only be started by root"
    exec 9>"${root%/}.lock" && flock 9 # one start at a time
    if is_running; then # a cluster that has accounting keeps it
        ! grep -q accounting_storage/slurmdbd "$SLURM_CONF" || accounting=1
        [[ $(slurm_conf) == "$(cat "$SLURM_CONF")" ]] || { say "its configuration has changed: restarting" && stop; }
    fi
    install_packages
    check_host_name
    write_files
    # 9 is closed for the daemons, which would otherwise keep the lock
    start_munge 9>&-
    ((!accounting)) || start_accounting 9>&-
    alive "$root/run/slurmctld.pid" slurmctld || slurmctld 9>&-
    within 20 bash -c 'scontrol ping | grep -q "is UP"' || fail "slurmctld does not answer; see $root/log/slurmctld.log"
    local node end=$((SECONDS + 60))
    for node in $(node_names); do start_node "$node" 9>&-; done
    until (($(num_ready) == nodes)); do
        ((SECONDS < end)) || fail "not all nodes came up: $(sinfo -h -N -o '%N %T' | xargs)"
        sleep 0.2
    done
    say "$nodes nodes are up$( ((!accounting)) || echo ', with accounting')"
    print_env
}

is_running() { alive "$root/run/slurmctld.pid" slurmctld; }
print_env() { printf 'export SLURM_CONF=%q\n' "$SLURM_CONF"; }

status() {
    is_running || { say "not running"; exit 1; }
    sinfo -N -o '%8N %8P %12T %10e %20E' && squeue
    print_env
}

# end SECONDS NAME PIDFILE...: ask these daemons to end, and kill what is left after that time.
end() {
    local deadline=$((SECONDS + $1)) name=$2 file pids=()
    shift 2
    for file; do
        alive "$file" "$name" && pids+=("$(cat "$file")")
        rm -f "$file"
    done
    ((${#pids[@]})) || return 0
    kill "${pids[@]}" 2>/dev/null || true
    while kill -0 "${pids[@]}" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.1; done
    kill -9 "${pids[@]}" 2>/dev/null || true
}

stop() {
    if is_running; then # no job may outlive its slurmd
        timeout 10 squeue -h -o %A | sort -u | xargs -r timeout 10 scancel || true
        within 15 bash -c '[[ -z $(squeue -h) ]]' || say "some jobs did not end: $(squeue -h -o '%i %T' | xargs)"
    fi
    end 10 slurm "$root/run/slurmctld.pid" "$root"/run/slurmd.*.pid
    end 10 slurmdbd "$root/run/slurmdbd.pid"
    end 20 mariadbd "$root/mariadb/mariadbd.pid"
    end 5 munged "$root/munge/munged.pid"
}

children() { ps -o pid= --ppid "$1" || true; }

# tree PID: that process and its descendants, children first.
tree() {
    local child
    for child in $(children "$1"); do tree "$child"; done
    echo "$1"
}

# The slurmstepds of NODE: all nodes are on this machine, so a step's node is read from the environment of its tasks.
steps_of() {
    local job stepd task
    for job in $(squeue -h -w "$1" -t R,CG,S -o %A); do
        for stepd in $(ps -eo pid=,args= | awk -v step="slurmstepd: [$job." 'index($0, step) {print $1}'); do
            for task in $(children "$stepd"); do
                if grep -zqx "SLURMD_NODENAME=$1" "/proc/$task/environ" 2>/dev/null; then
                    echo "$stepd"
                    break
                fi
            done
        done
    done
}

fail_node() {
    local node=$1 pids=() stepd
    is_node "$node"
    for stepd in $(steps_of "$node"); do mapfile -t -O "${#pids[@]}" pids < <(tree "$stepd"); done
    alive "$(slurmd_pid "$node")" "slurmd -N $node" && pids=("$(cat "$(slurmd_pid "$node")")" "${pids[@]}")
    ((${#pids[@]} == 0)) || kill -9 "${pids[@]}" 2>/dev/null || true
    rm -f "$(slurmd_pid "$node")"
    say "$node: killed ${#pids[@]} processes"
}

fail_slurmd() {
    is_node "$1"
    alive "$(slurmd_pid "$1")" "slurmd -N $1" || fail "no slurmd runs on $1"
    kill -9 "$(cat "$(slurmd_pid "$1")")"
    rm -f "$(slurmd_pid "$1")"
}

restore_node() {
    is_node "$1"
    start_node "$1"
    within 30 bash -c "sinfo -h -n $1 -o %T | grep -qE '^(idle|mixed|allocated)\$'" ||
        fail "$1 does not come back: $(sinfo -h -n "$1" -o '%T %E' | head -1)"
}

accounting=0
command=${1:-}
shift || true
case "$command ${1:-}" in
    "start ") start ;;
    "start --with-accounting") accounting=1 && start ;;
    "stop --wipe") stop && rm -rf "$root" "${root%/}.lock" ;;
    "stop ") stop ;;
    "status ") status ;;
    "env ") print_env ;;
    "fail-node node"*) fail_node "$1" ;;
    "fail-slurmd node"*) fail_slurmd "$1" ;;
    "restore-node node"*) restore_node "$1" ;;
    *) sed -n '4,10s/^# \{0,5\}//p' "$0" >&2 && exit 2 ;;
esac
