//! What a process would try that a hostile checkpoint has taken over, for tests and for `moored doctor`. Each try is harmless where it
//! succeeds.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Confinement;

/// How long a connection to the service may take.
const CONNECT: Duration = Duration::from_secs(2);

/// One try.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tried {
    /// What was tried, in words.
    pub(crate) what: String,
    pub(crate) outcome: Outcome,
}

/// How a try ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Outcome {
    /// The system refused it: this process may not do it.
    Refused,
    Succeeded,
    /// It failed for another reason: there was nothing to find.
    Failed(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Refused => f.write_str("refused"),
            Outcome::Succeeded => f.write_str("succeeded"),
            Outcome::Failed(why) => write!(f, "failed: {why}"),
        }
    }
}

/// Tries everything.
pub(crate) fn try_all(confinement: &Confinement) -> Vec<Tried> {
    let mut all = Tries(Vec::new());
    for place in &confinement.never {
        all.add(format!("read {}", place.display()), read(place));
    }
    all.add("read /etc/shadow".to_owned(), read(Path::new("/etc/shadow")));
    if let Some(home) = config::home_folder() {
        all.add(format!("list {}", home.display()), fs::read_dir(home).map(drop));
    }
    for place in &confinement.read {
        all.add(format!("write into {}", place.display()), write(place));
    }
    // The rights stay as they are.
    for place in confinement.never.iter().filter(|place| place.exists()) {
        let changed = fs::metadata(place).and_then(|facts| fs::set_permissions(place, facts.permissions()));
        all.add(format!("change who may read {}", place.display()), changed);
    }
    all.try_sockets(confinement.service);
    all.add(
        "run a program".to_owned(),
        Command::new("/bin/true").status().map(drop),
    );
    all.try_processes();
    #[cfg(target_os = "linux")]
    for (name, number) in super::calls::DENIED {
        let answer = match gpu::refuses_call(*number) {
            true => Err(io::ErrorKind::PermissionDenied.into()),
            false => Ok(()), // it was carried out as far as arguments without sense go
        };
        all.add(format!("call {}", name.trim_start_matches("SYS_")), answer);
    }
    all.0
}

struct Tries(Vec<Tried>);

impl Tries {
    fn add(&mut self, what: String, result: io::Result<()>) {
        let outcome = match result {
            Ok(()) => Outcome::Succeeded,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Outcome::Refused,
            Err(error) => Outcome::Failed(error.to_string()),
        };
        self.0.push(Tried { what, outcome });
    }

    fn try_sockets(&mut self, service: SocketAddr) {
        let here: SocketAddr = ([127, 0, 0, 1], 0).into();
        self.add(
            "listen on a TCP port".to_owned(),
            TcpListener::bind(here).map(drop),
        );
        self.add("open a UDP socket".to_owned(), UdpSocket::bind(here).map(drop));
        let connected = TcpStream::connect_timeout(&service, CONNECT).map(drop);
        self.add("connect to the service".to_owned(), connected);
        let docker = UnixStream::connect("/var/run/docker.sock").map(drop);
        self.add("connect to a socket of this machine".to_owned(), docker);
        self.add(
            "open a datagram socket of this machine".to_owned(),
            UnixDatagram::unbound().map(drop),
        );
    }

    /// The process that started this one: the service.
    fn try_processes(&mut self) {
        let Some(parent) = rustix::process::getppid() else {
            return;
        };
        let signalled = rustix::process::test_kill_process(parent);
        self.add(
            "signal the service".to_owned(),
            signalled.map_err(io::Error::from),
        );
        let of_parent = |name: &str| format!("/proc/{}/{name}", parent.as_raw_nonzero());
        self.add(
            "read the service's memory".to_owned(),
            File::open(of_parent("mem")).map(drop),
        );
        self.add(
            "read the service's variables".to_owned(),
            read(Path::new(&of_parent("environ"))),
        );
        self.add(
            "read the service's descriptors".to_owned(),
            fs::read_dir(of_parent("fd")).map(drop),
        );
    }
}

/// Reads a file or lists a folder.
fn read(place: &Path) -> io::Result<()> {
    if place.is_dir() {
        return fs::read_dir(place).map(drop);
    }
    File::open(place)?.read(&mut [0; 16]).map(drop)
}

/// Makes a file in a folder, and removes it; opens a file to write it, and leaves it as it is.
fn write(place: &Path) -> io::Result<()> {
    if !place.is_dir() {
        return fs::OpenOptions::new().write(true).open(place).map(drop);
    }
    let file = place.join(format!(".moored-try-{}", std::process::id()));
    File::create_new(&file)?;
    fs::remove_file(&file)
}
