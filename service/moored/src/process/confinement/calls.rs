//! The system calls that a worker is denied, by seccomp. They fail with `EPERM`.

use std::collections::BTreeMap;
use std::path::Path;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use super::MPS;

/// Names and numbers of system calls.
macro_rules! calls {
    ($($name:ident)*) => { &[$((stringify!($name), libc::$name)),*] };
}

/// What no worker calls, whatever its card, and `refuses_call` may ask for (see there).
pub(super) const DENIED: &[(&str, i64)] = calls! {
    // Programs and other processes.
    SYS_execve SYS_execveat SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_pidfd_open SYS_pidfd_getfd
    SYS_pidfd_send_signal SYS_kcmp SYS_process_madvise SYS_process_mrelease SYS_tkill
    // Ways around these filters.
    SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register SYS_userfaultfd SYS_bpf SYS_perf_event_open
    // Other views of the system.
    SYS_unshare SYS_setns SYS_chroot SYS_pivot_root SYS_mount SYS_umount2 SYS_move_mount SYS_open_tree SYS_fsopen SYS_fsconfig
    SYS_fsmount SYS_fspick SYS_mount_setattr SYS_open_by_handle_at SYS_name_to_handle_at SYS_fanotify_init
    // Who owns a file and who may read it, which Landlock leaves open.
    SYS_fchmod SYS_fchmodat SYS_fchmodat2 SYS_fchown SYS_fchownat SYS_setxattr SYS_lsetxattr SYS_fsetxattr SYS_removexattr
    SYS_lremovexattr SYS_fremovexattr SYS_utimensat
    // Keys, and memory and messages that processes share by a number or a name.
    SYS_add_key SYS_request_key SYS_keyctl SYS_shmget SYS_shmat SYS_semget SYS_mq_open
    // The machine.
    SYS_init_module SYS_finit_module SYS_delete_module SYS_kexec_load SYS_kexec_file_load SYS_reboot SYS_swapon SYS_swapoff SYS_acct
    SYS_quotactl SYS_syslog SYS_sethostname SYS_setdomainname SYS_settimeofday SYS_clock_settime SYS_clock_adjtime SYS_adjtimex
};

/// The same, which must not be called in a test.
const DENIED_UNTESTED: &[(&str, i64)] = calls! { SYS_msgget SYS_vhangup };

#[cfg(target_arch = "x86_64")]
const DENIED_HERE: &[(&str, i64)] = calls! { SYS_fork SYS_vfork SYS_chmod SYS_chown SYS_lchown SYS_utime SYS_utimes SYS_futimesat SYS_iopl SYS_ioperm };
#[cfg(not(target_arch = "x86_64"))]
const DENIED_HERE: &[(&str, i64)] = &[];

/// Calls by which a process has sockets.
const SOCKETS: &[(&str, i64)] =
    calls! { SYS_socket SYS_socketpair SYS_bind SYS_listen SYS_accept SYS_accept4 SYS_connect };

/// The flags of `clone` that make another view of the system.
const NAMESPACES: [libc::c_int; 7] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
];

/// Denies them to all threads of this process, and to those that they start.
pub(super) fn deny(drives_nvidia: bool) -> Result<(), String> {
    for program in [filter(drives_nvidia), unknown_calls()] {
        let program = program.map_err(|error| error.to_string())?;
        seccompiler::apply_filter_all_threads(&program).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// The filter of what is refused.
fn filter(drives_nvidia: bool) -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for (_, number) in [DENIED, DENIED_UNTESTED, DENIED_HERE].concat() {
        rules.insert(number, Vec::new()); // no condition: always
    }
    match drives_nvidia {
        false => rules.extend(SOCKETS.iter().map(|(_, number)| (*number, Vec::new()))),
        true => rules.extend(sockets_beside_nvidia()?),
    }
    rules.extend(of_other_processes(std::process::id())?);
    // What a terminal would take for keys that were pressed.
    let typed = [libc::TIOCSTI, libc::TIOCLINUX].map(|request| rule(&[(1, Eq, u64::from(request as u32))]));
    rules.insert(libc::SYS_ioctl, typed.into_iter().collect::<Result<_, _>>()?);
    // Threads, no processes.
    let flags = NAMESPACES
        .map(|flag| flag as u64)
        .map(|flag| (Masked(flag), flag));
    let cloned = flags.into_iter().chain([(Masked(libc::CLONE_THREAD as u64), 0)]);
    let cloned = cloned.map(|(compared, value)| rule(&[(0, compared, value)]));
    rules.insert(libc::SYS_clone, cloned.collect::<Result<_, _>>()?);
    compiled(with_x32(rules), libc::EPERM)
}

/// The filter of what is answered as by an older kernel: the flags of `clone3` are in memory, where no filter sees them, and the C
/// library calls `clone` instead.
fn unknown_calls() -> Result<BpfProgram, seccompiler::BackendError> {
    let rules = with_x32(BTreeMap::from([(libc::SYS_clone3, Vec::new())]));
    compiled(rules, libc::ENOSYS)
}

fn compiled(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    answer: libc::c_int,
) -> Result<BpfProgram, seccompiler::BackendError> {
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    let denied = SeccompAction::Errno(answer.unsigned_abs());
    SeccompFilter::new(rules, SeccompAction::Allow, denied, architecture)?.try_into()
}

/// A condition of an argument.
#[derive(Clone, Copy)]
enum Compared {
    Eq,
    Ne,
    Masked(u64),
}
use Compared::{Eq, Masked, Ne};

/// A rule: all conditions hold. Arguments are compared as 32 bits, which is what the kernel takes of each of them.
fn rule(conditions: &[(u8, Compared, u64)]) -> Result<SeccompRule, seccompiler::BackendError> {
    let conditions = conditions.iter().map(|&(argument, compared, value)| {
        let operator = match compared {
            Eq => SeccompCmpOp::Eq,
            Ne => SeccompCmpOp::Ne,
            Masked(mask) => SeccompCmpOp::MaskedEq(mask),
        };
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
    });
    SeccompRule::new(conditions.collect::<Result<_, _>>()?)
}

/// The driver listens on a socket of this machine while it starts. No socket reaches another machine, and none is connected, unless
/// programs share the card by NVIDIA's daemon, which the driver connects to.
fn sockets_beside_nvidia() -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
    const KINDS: u64 = 0xf; // the rest are flags
    let datagrams = || rule(&[(1, Masked(KINDS), libc::SOCK_DGRAM as u64)]); // they could be sent anywhere
    let mut rules = BTreeMap::from([
        (
            libc::SYS_socket,
            vec![rule(&[(0, Ne, libc::AF_UNIX as u64)])?, datagrams()?],
        ),
        (libc::SYS_socketpair, vec![datagrams()?]),
    ]);
    let (variable, folder) = MPS;
    if config::variable(variable).is_none() && !Path::new(folder).exists() {
        rules.insert(libc::SYS_connect, Vec::new());
    }
    Ok(rules)
}

/// Signals to other processes, and their limits.
fn of_other_processes(own: u32) -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
    let own = u64::from(own);
    let signals = [
        libc::SYS_kill,
        libc::SYS_tgkill,
        libc::SYS_rt_sigqueueinfo,
        libc::SYS_rt_tgsigqueueinfo,
    ];
    let mut rules = BTreeMap::new();
    for signal in signals {
        rules.insert(signal, vec![rule(&[(0, Ne, own)])?]);
    }
    rules.insert(libc::SYS_prlimit64, vec![rule(&[(0, Ne, own), (0, Ne, 0)])?]);
    Ok(rules)
}

/// The rules with those of the same calls in the x32 interface, by which a process of x86-64 could make them too.
#[cfg(target_arch = "x86_64")]
fn with_x32(mut rules: BTreeMap<i64, Vec<SeccompRule>>) -> BTreeMap<i64, Vec<SeccompRule>> {
    const X32: i64 = 0x4000_0000;
    /// Calls that have another number there.
    const OTHERS: [(i64, i64); 13] = [
        (libc::SYS_execve, 520),
        (libc::SYS_ptrace, 521),
        (libc::SYS_rt_sigqueueinfo, 524),
        (libc::SYS_ioctl, 514),
        (libc::SYS_mq_open, 240),
        (libc::SYS_kexec_load, 528),
        (libc::SYS_rt_tgsigqueueinfo, 536),
        (libc::SYS_process_vm_readv, 539),
        (libc::SYS_process_vm_writev, 540),
        (libc::SYS_execveat, 545),
        (libc::SYS_clone, 56),
        (libc::SYS_kill, 62),
        (libc::SYS_tgkill, 234),
    ];
    let same = rules.iter().map(|(number, rule)| (*number, rule.clone()));
    let others = OTHERS
        .into_iter()
        .filter_map(|(number, other)| Some((other, rules.get(&number)?.clone())));
    let of_x32: Vec<_> = same
        .chain(others)
        .map(|(number, rule)| (number | X32, rule))
        .collect();
    rules.extend(of_x32);
    rules
}

#[cfg(not(target_arch = "x86_64"))]
fn with_x32(rules: BTreeMap<i64, Vec<SeccompRule>>) -> BTreeMap<i64, Vec<SeccompRule>> {
    rules
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::net::{TcpListener, UdpSocket};
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
    use std::process::Command;

    use super::*;

    /// What a closure finds on a thread with these filters; the others of this process have none.
    fn denied<T: Send + 'static>(drives_nvidia: bool, tries: impl FnOnce() -> T + Send + 'static) -> T {
        let programs = [filter(drives_nvidia).unwrap(), unknown_calls().unwrap()];
        let thread = std::thread::spawn(move || {
            for program in &programs {
                seccompiler::apply_filter(program).unwrap();
            }
            tries()
        });
        thread.join().unwrap()
    }

    fn is_refused<T>(result: io::Result<T>) -> bool {
        result.is_err_and(|error| error.raw_os_error() == Some(libc::EPERM))
    }

    fn abstract_address() -> SocketAddr {
        SocketAddr::from_abstract_name(format!("moored-test-{}", std::process::id())).unwrap()
    }

    #[test]
    fn beside_a_driver_sockets_of_this_machine_may_listen_and_nothing_reaches_out() {
        denied(true, || {
            UnixStream::pair().unwrap();
            let _listens = UnixListener::bind_addr(&abstract_address()).unwrap();
            assert!(is_refused(UnixStream::connect_addr(&abstract_address())));
            assert!(is_refused(UnixDatagram::unbound()));
            assert!(is_refused(UnixDatagram::pair()));
            assert!(is_refused(UdpSocket::bind("127.0.0.1:0")));
            assert!(is_refused(TcpListener::bind("127.0.0.1:0")));
            assert!(is_refused(Command::new("/bin/true").status()));
        });
    }

    #[test]
    fn a_thread_may_be_started_and_a_process_may_not() {
        denied(false, || {
            assert_eq!(std::thread::spawn(|| 7).join().unwrap(), 7);
            assert!(is_refused(Command::new("/bin/true").status()));
            assert!(is_refused(UnixStream::pair()));
        });
    }

    #[test]
    fn a_process_signals_itself_alone() {
        let parent = rustix::process::getppid().unwrap();
        let own = rustix::process::getpid();
        denied(false, move || {
            assert_eq!(rustix::process::test_kill_process(own), Ok(()));
            assert_eq!(
                rustix::process::test_kill_process(parent),
                Err(rustix::io::Errno::PERM)
            );
        });
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn calls_by_the_x32_interface_are_denied_too() {
        const X32: i64 = 0x4000_0000;
        denied(false, || {
            for number in [libc::SYS_socket, libc::SYS_ptrace, libc::SYS_io_uring_setup, 520] {
                assert!(gpu::refuses_call(number | X32), "{number}");
            }
        });
    }
}
