//! System memory: total, available, and release of freed memory.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use residency::Bytes;
use sysinfo::{CGroupLimits, MemoryRefreshKind, Pid, Process, ProcessRefreshKind, ProcessesToUpdate, System};

use crate::card::GpuError;

/// Cache lifetime of a reading: planning reads many times within one decision.
const CACHE_LIFETIME: Duration = Duration::from_millis(50);

/// Cache lifetime of the fact that there is no cgroup limit: it rarely changes, and looking it up costs ten times the
/// rest of a reading.
const UNLIMITED_CACHE_LIFETIME: Duration = Duration::from_secs(10);

/// System memory at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemMemory {
    /// Limit of this process: the machine's memory, or the cgroup's.
    pub total: Bytes,
    /// Bytes that could be allocated now. Page cache counts as available: the kernel reclaims it.
    pub available: Bytes,
}

/// Reads [`SystemMemory`], with a cache.
pub struct SystemReader {
    system: System,
    own: Option<Pid>,
    last: Option<(Instant, SystemMemory)>,
    unlimited_since: Option<Instant>,
}

impl SystemReader {
    /// # Errors
    /// [`GpuError::Truth`] where the system's figures cannot be read.
    pub fn new() -> Result<SystemReader, GpuError> {
        let mut system = System::new().map_err(|e| GpuError::Truth(e.to_string()))?;
        let own = sysinfo::get_current_pid().ok();
        if let Some(pid) = own {
            // Only so that the process's cgroup can be looked up; nothing else of it is read.
            let which = ProcessesToUpdate::Some(&[pid]);
            system.refresh_processes_specifics(which, false, ProcessRefreshKind::nothing().without_tasks());
        }
        Ok(SystemReader {
            system,
            own,
            last: None,
            unlimited_since: None,
        })
    }

    /// A reading that is at most 50 ms old.
    ///
    /// # Errors
    /// [`GpuError::Truth`].
    pub fn read(&mut self) -> Result<SystemMemory, GpuError> {
        if let Some((at, memory)) = self.last
            && at.elapsed() < CACHE_LIFETIME
        {
            return Ok(memory);
        }
        let memory = self.read_now()?;
        self.last = Some((Instant::now(), memory));
        Ok(memory)
    }

    /// Resident memory of a process; zero if there is none of that id.
    pub fn resident(&mut self, pid: u32) -> Bytes {
        let pid = Pid::from_u32(pid);
        let memory = ProcessRefreshKind::nothing().with_memory().without_tasks();
        self.system
            .refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), true, memory);
        Bytes(self.system.process(pid).map_or(0, Process::memory))
    }

    /// Invalidates the cached reading, after a change of ours that the next one must show.
    pub(crate) fn expire(&mut self) {
        self.last = None;
    }

    fn read_now(&mut self) -> Result<SystemMemory, GpuError> {
        self.system
            .refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
        let (total, available) = (self.system.total_memory(), self.system.available_memory());
        if total == 0 {
            return Err(GpuError::Truth(
                "the system does not say how much memory it has".to_owned(),
            ));
        }
        let limits = self.limits();
        let (total, available) = match limits {
            // `free_memory` counts the page cache as used; memory that cannot be reclaimed is resident.
            Some(limits) => (
                total.min(limits.total_memory),
                available.min(limits.total_memory.saturating_sub(limits.rss)),
            ),
            None => (total, available),
        };
        Ok(SystemMemory {
            total: Bytes(total),
            available: Bytes(available.min(total)),
        })
    }

    /// The limits of this process's cgroup and its ancestors; `None` if there are none.
    fn limits(&mut self) -> Option<CGroupLimits> {
        if self
            .unlimited_since
            .is_some_and(|at| at.elapsed() < UNLIMITED_CACHE_LIFETIME)
        {
            return None;
        }
        let own = self
            .own
            .and_then(|pid| self.system.process(pid))
            .and_then(Process::cgroup_limits);
        let limits = own
            .or_else(|| self.system.cgroup_limits())
            .filter(|limits| limits.total_memory > 0);
        self.unlimited_since = limits.is_none().then(Instant::now);
        limits
    }
}

/// Closes all descriptors of this process but `keep` and those of standard input, output and error. It is to be called before the
/// process has opened anything else: what is open then was left open by those who started the program.
///
/// # Errors
/// The operating system's error: Linux has this since version 5.9.
pub fn close_inherited(keep: BorrowedFd<'_>) -> io::Result<()> {
    const FIRST: u32 = 3;
    let keep = keep.as_raw_fd().unsigned_abs().max(FIRST - 1);
    for (first, last) in [(FIRST, keep.saturating_sub(1)), (keep + 1, u32::MAX)] {
        if first <= last {
            close_between(first, last)?;
        }
    }
    Ok(())
}

#[cfg(target_os = "linux")]
fn close_between(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: the call reads no memory of ours; nothing of this process owns a descriptor yet but `keep`, as the caller knows.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(not(target_os = "linux"))]
fn close_between(_first: u32, _last: u32) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Whether the system answers a call with `EPERM`, before it has looked at the arguments: they are all -1, which no call takes.
/// For tests of what a process may do. Calls without arguments, and those that take -1, would be carried out.
pub fn refuses_call(number: libc::c_long) -> bool {
    const NONE: libc::c_long = -1;
    // SAFETY: there is no memory at -1, so a call that reads or writes there fails.
    let answer = unsafe { libc::syscall(number, NONE, NONE, NONE, NONE, NONE, NONE) };
    answer == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::EPERM)
}

/// Ends the process at once, without destructors or exit handlers. Those of a GPU's libraries wait for the card,
/// forever if it is lost; and they race with a thread that is computing. The system frees all memory of the process
/// either way.
pub fn end_process(code: i32) -> ! {
    // SAFETY: `_exit` takes any number and does not return.
    unsafe { libc::_exit(code) }
}
