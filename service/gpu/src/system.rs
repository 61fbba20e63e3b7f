//! System memory: what there is, what is available, and giving it back.

use std::time::{Duration, Instant};

use residency::Bytes;
use sysinfo::{CGroupLimits, MemoryRefreshKind, Pid, Process, ProcessRefreshKind, ProcessesToUpdate, System};

use crate::card::GpuError;

/// A reading is good for so long: planning asks many times within one decision.
const GOOD_FOR: Duration = Duration::from_millis(50);

/// A process outside of any limited cgroup seldom comes into one, and asking costs ten times what all the rest
/// of a reading does: the answer that there is no limit is believed for so long.
const UNLIMITED_FOR: Duration = Duration::from_secs(10);

/// System memory at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SystemMemory {
    /// What this process may use at most: of the machine, or of its cgroup.
    pub(crate) total: Bytes,
    /// What could be allocated now. Page cache counts as available: the kernel gives it up.
    pub(crate) available: Bytes,
}

/// Reads [`SystemMemory`], and remembers it for a moment.
pub(crate) struct SystemReader {
    system: System,
    own: Option<Pid>,
    last: Option<(Instant, SystemMemory)>,
    unlimited_since: Option<Instant>,
}

impl SystemReader {
    pub(crate) fn new() -> Result<SystemReader, GpuError> {
        let mut system = System::new().map_err(|e| GpuError::Truth(e.to_string()))?;
        let own = sysinfo::get_current_pid().ok();
        if let Some(pid) = own {
            // Only so that the process can be asked for its cgroup; nothing else of it is read.
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
    pub(crate) fn read(&mut self) -> Result<SystemMemory, GpuError> {
        if let Some((at, memory)) = self.last
            && at.elapsed() < GOOD_FOR
        {
            return Ok(memory);
        }
        let memory = self.read_now()?;
        self.last = Some((Instant::now(), memory));
        Ok(memory)
    }

    /// Forgets the last reading, since we changed something that it must show.
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
            // `free_memory` would count the page cache as taken; what cannot be given up is resident.
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

    /// The limits of the cgroup that this process is in, with those around it; `None` where there are none.
    fn limits(&mut self) -> Option<CGroupLimits> {
        if self
            .unlimited_since
            .is_some_and(|at| at.elapsed() < UNLIMITED_FOR)
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

/// Asks the C library to give back what it keeps of freed memory. It keeps gigabytes after a large component
/// was dropped, which nobody else can use. Does nothing where there is no glibc.
pub(crate) fn give_back() {
    #[cfg(target_env = "gnu")]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> std::ffi::c_int;
        }
        // SAFETY: glibc's `malloc_trim` takes any pad, may be called from any thread at any time, and touches
        // no memory that is allocated.
        unsafe { malloc_trim(0) };
    }
}

/// Ends the process at once: no destructor, no exit handler. Those of a GPU's libraries wait for the card, which for a
/// card that is lost may be for ever; and with another thread in the middle of a computation they race with it. The
/// system gives all of the process's memory back either way.
pub fn end_process(code: i32) -> ! {
    unsafe extern "C" {
        fn _exit(code: std::ffi::c_int) -> !;
    }
    // SAFETY: it takes any number and does not come back.
    unsafe { _exit(code) }
}
