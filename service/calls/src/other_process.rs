//! Watches whether a process that is not ours has ended.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use engine::queue::Queue;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// How often it is checked whether the process of a reservation has ended.
const PROCESS_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A process of this machine. This value names the same process for as long as it lives, even if the system gives the id to another.
#[derive(Debug)]
pub(crate) struct OtherProcess {
    id: u32,
    /// Readable once the process has ended.
    end: OwnedFd,
}

/// Why a process cannot be watched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OtherProcessError {
    #[error("there is no process {0} on the machine of the service, or in its container")]
    None(u32),
    #[error("process {id} cannot be watched: {problem}")]
    Unwatchable { id: u32, problem: io::Error },
}

impl OtherProcess {
    /// Finds a process by its id.
    ///
    /// # Errors
    /// When there is none, or the system cannot watch it.
    pub(crate) fn open(id: u32) -> Result<OtherProcess, OtherProcessError> {
        let pid = i32::try_from(id).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or(OtherProcessError::None(id))?;
        match pidfd_open(pid, PidfdFlags::NONBLOCK) {
            Ok(end) => Ok(OtherProcess { id, end }),
            Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL) => Err(OtherProcessError::None(id)),
            Err(problem) => Err(OtherProcessError::Unwatchable {
                id,
                problem: problem.into(),
            }),
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// Releases a reservation once the process has ended. It returns then, or when the reservation is gone.
    pub(crate) async fn release_at_its_end(self, queue: &Queue, id: &str) {
        while !self.has_ended() {
            tokio::time::sleep(PROCESS_CHECK_INTERVAL).await;
            let status = queue.status_now().await;
            let mut there = status.cards.iter().flat_map(|card| &card.reservations);
            if !there.any(|reservation| reservation.id == id) {
                return; // it was released, or has expired
            }
        }
        queue.release_reservation(id).await;
    }

    /// Whether the process has ended. A process that cannot be polled counts as ended.
    pub(crate) fn has_ended(&self) -> bool {
        let mut end = [PollFd::new(&self.end, PollFlags::IN)];
        !matches!(
            poll(&mut end, Some(&Timespec::default())),
            Ok(0) | Err(rustix::io::Errno::INTR)
        )
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_end_of_a_process_is_seen() {
        let mut sleeping = Command::new("sleep").arg("600").spawn().unwrap();
        let process = OtherProcess::open(sleeping.id()).unwrap();
        assert_eq!(process.id(), sleeping.id());
        assert!(!process.has_ended());
        sleeping.kill().unwrap();
        sleeping.wait().unwrap();
        assert!(process.has_ended());
        let gone = OtherProcess::open(sleeping.id());
        assert!(matches!(gone, Err(OtherProcessError::None(_))), "{gone:?}");
        for none in [0, u32::MAX] {
            assert!(matches!(
                OtherProcess::open(none),
                Err(OtherProcessError::None(_))
            ));
        }
    }
}
