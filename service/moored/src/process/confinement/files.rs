//! The files of a worker, by Landlock.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, LandlockStatus, PathBeneath, PathFd, Ruleset,
    RulesetAttr as _, RulesetCreated, RulesetCreatedAttr as _, RulesetError, Scope,
};

use super::{Confinement, MPS, without};

/// The newest version of the interface of which all rights are handled. An older kernel handles those that it knows.
const NEWEST: ABI = ABI::V6;

/// Folders of libraries and of facts about the machine.
const OF_SYSTEM: [&str; 18] = [
    "/usr",
    "/lib",
    "/lib32",
    "/lib64",
    "/opt/cuda",
    "/opt/nvidia",
    "/nix/store",
    "/gnu/store",
    "/sys",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/ld.so.preload",
    "/etc/localtime",
    "/etc/nvidia",
    "/dev/random",
    "/dev/urandom",
    "/dev/zero",
];

/// Facts about the machine in `/proc`. What other processes are is not among them, nor what they were started with.
const OF_PROC: [&str; 16] = [
    "cgroups",
    "cpuinfo",
    "devices",
    "driver",
    "filesystems",
    "loadavg",
    "meminfo",
    "modules",
    "mounts",
    "partitions",
    "self",
    "stat",
    "sys",
    "uptime",
    "version",
    "vmstat",
];

/// Variables with folders of libraries, separated by colons.
const LIBRARIES: &str = "LD_LIBRARY_PATH";

/// Confines this thread and those that it will start. The version of the interface, and how many places of models may be read.
pub(super) fn confine(confinement: &Confinement) -> Result<(i32, usize), String> {
    rules(confinement).map_err(|error| error.to_string())?
}

fn rules(confinement: &Confinement) -> Result<Result<(i32, usize), String>, RulesetError> {
    let never: Vec<PathBuf> = confinement.never.iter().filter_map(canonical).collect();
    let mut rules = Rules {
        ruleset: Ruleset::default()
            .handle_access(AccessFs::from_all(NEWEST))?
            .handle_access(AccessNet::from_all(NEWEST))?
            .scope(Scope::from_all(NEWEST))?
            .create()?,
        never,
    };
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    for place in OF_SYSTEM.iter().map(PathBuf::from).chain(libraries()) {
        rules.grant(&place, read)?;
    }
    rules.grant(
        Path::new("/dev/null"),
        read | AccessFs::WriteFile | AccessFs::Truncate,
    )?;
    for name in OF_PROC {
        rules.grant_and_keep(&Path::new("/proc").join(name), read)?;
    }
    if confinement.drives_nvidia {
        rules.grant_nvidia()?;
    }
    let mut places = 0;
    for place in &confinement.read {
        places += usize::from(rules.grant(place, read)? > 0);
    }
    for folder in &confinement.write {
        let _ = gpu::create_private_folder(folder); // what is missing then is not needed to start
        if let Ok(open) = PathFd::new(folder) {
            rules.add(open, written())?; // what must not be read is around it
        }
    }
    let status = rules.ruleset.restrict_self()?;
    Ok(match status.landlock {
        LandlockStatus::Available { effective_abi, .. } => Ok((effective_abi as i32, places)),
        LandlockStatus::NotEnabled => Err("Landlock is not switched on in this kernel".to_owned()),
        LandlockStatus::NotImplemented => {
            Err("this kernel has no Landlock, which Linux has since 5.13".to_owned())
        }
    })
}

/// The rights in a folder that is written in.
fn written() -> BitFlags<AccessFs> {
    AccessFs::ReadFile
        | AccessFs::ReadDir
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::MakeDir
        | AccessFs::RemoveFile
        | AccessFs::RemoveDir
        | AccessFs::Refer
}

/// Folders of libraries: of this program, of the environment that it is installed in, and those that a variable names.
fn libraries() -> Vec<PathBuf> {
    let program = std::env::current_exe().ok();
    let named = config::variable(LIBRARIES).unwrap_or_default();
    let named = named
        .split(':')
        .filter(|folder| !folder.is_empty())
        .map(PathBuf::from);
    // Installed by pip, the program is in `bin`, and the libraries of NVIDIA are in `lib` beside that.
    let environment = program.as_deref().and_then(|program| {
        let folder = program.parent()?;
        folder.ends_with("bin").then(|| folder.parent())?
    });
    let environment = environment
        .into_iter()
        .flat_map(|folder| [folder.join("lib"), folder.join("lib64")]);
    program
        .clone()
        .into_iter()
        .chain(named)
        .chain(environment)
        .collect()
}

/// Rules that are being collected.
struct Rules {
    ruleset: RulesetCreated,
    /// Without links.
    never: Vec<PathBuf>,
}

impl Rules {
    /// Grants rights in a place, less what must not be read. How many rules that took: none where the place is missing.
    fn grant(&mut self, place: &Path, rights: BitFlags<AccessFs>) -> Result<usize, RulesetError> {
        let Some(place) = canonical(place) else {
            return Ok(0);
        };
        // A place that is named within one that must not be read is meant.
        let is_around = |never: &PathBuf| place.starts_with(never) && place != *never;
        let never: Vec<PathBuf> = self
            .never
            .iter()
            .filter(|never| !is_around(never))
            .cloned()
            .collect();
        let mut granted = 0;
        for part in without(&place, &never) {
            if let Ok(open) = PathFd::new(&part) {
                self.add(open, rights)?;
                granted += 1;
            }
        }
        Ok(granted)
    }

    /// As [`Rules::grant`], of a place that is in `/proc`. The kernel forgets and makes again what is there, and a rule is of what was
    /// there: so it is kept open for as long as the process lives.
    fn grant_and_keep(&mut self, place: &Path, rights: BitFlags<AccessFs>) -> Result<(), RulesetError> {
        if let Ok(open) = PathFd::new(place) {
            self.add(open, rights)?;
            std::mem::forget(PathFd::new(place));
        }
        Ok(())
    }

    fn add(&mut self, open: PathFd, rights: BitFlags<AccessFs>) -> Result<(), RulesetError> {
        use std::os::fd::AsFd as _;
        let is_folder = rustix::fs::fstat(open.as_fd())
            .is_ok_and(|facts| rustix::fs::FileType::from_raw_mode(facts.st_mode).is_dir());
        let rights = match is_folder {
            true => rights,
            false => rights & AccessFs::from_file(NEWEST),
        };
        (&mut self.ruleset).add_rule(PathBeneath::new(open, rights))?;
        Ok(())
    }

    /// What the libraries of NVIDIA need beside: their devices, memory that is shared by name, the names of threads (which the driver
    /// writes, and fails without), the names of other processes on the card, and the pipes of a control daemon.
    fn grant_nvidia(&mut self) -> Result<(), RulesetError> {
        let device = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::ReadDir | AccessFs::IoctlDev;
        let devices = std::fs::read_dir("/dev").into_iter().flatten().flatten();
        for device_file in devices {
            let name = device_file.file_name();
            let name = name.to_string_lossy();
            if name.starts_with("nvidia") || name == "dxg" {
                self.grant(&device_file.path(), device)?;
            }
        }
        let read = AccessFs::ReadFile | AccessFs::ReadDir;
        self.grant_and_keep(Path::new("/proc"), read)?;
        self.grant_and_keep(
            Path::new("/proc/self/task"),
            AccessFs::WriteFile | AccessFs::Truncate,
        )?;
        self.grant(Path::new("/dev/shm"), written())?;
        let pipes = config::variable(MPS.0).unwrap_or_else(|| MPS.1.to_owned());
        self.grant(
            Path::new(&pipes),
            written() | AccessFs::MakeSock | AccessFs::MakeFifo,
        )?;
        Ok(())
    }
}

fn canonical(path: impl AsRef<Path>) -> Option<PathBuf> {
    path.as_ref().canonicalize().ok()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::ErrorKind;

    use super::*;
    use crate::process::confinement::Strictness;

    /// What a closure finds on a thread that is confined so; the others of this process are not.
    fn confined<T: Send + 'static>(
        confinement: Confinement,
        tries: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let thread = std::thread::spawn(move || match confine(&confinement) {
            Ok(_) => Some(tries()),
            Err(lacks) => {
                eprintln!("not tried: {lacks}");
                None
            }
        });
        thread.join().unwrap()
    }

    fn confinement(read: &[&Path], write: &[&Path], never: &[&Path]) -> Confinement {
        let owned = |paths: &[&Path]| paths.iter().map(|path| path.to_path_buf()).collect();
        Confinement {
            strictness: Strictness::All,
            is_required: false,
            drives_nvidia: false,
            read: owned(read),
            write: owned(write),
            never: owned(never),
            service: "127.0.0.1:1".parse().unwrap(),
        }
    }

    #[test]
    fn what_is_granted_is_read_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let (models, plans, state) = (root.join("models"), root.join("state/plans"), root.join("state"));
        for made in [&models, &state, &root.join("elsewhere")] {
            fs::create_dir_all(made).unwrap();
        }
        for file in ["models/a", "state/token", "elsewhere/b"] {
            fs::write(root.join(file), "x").unwrap();
        }
        // The folder around everything is named, as by a careless configuration.
        confined(confinement(&[&root], &[&plans], &[&state]), move || {
            let kind = |result: std::io::Result<()>| result.map_err(|error| error.kind());
            assert_eq!(fs::read_to_string(models.join("a")).unwrap(), "x");
            assert_eq!(fs::read_to_string(root.join("elsewhere/b")).unwrap(), "x");
            let denied = Err(ErrorKind::PermissionDenied);
            assert_eq!(kind(fs::read(state.join("token")).map(drop)), denied);
            assert_eq!(kind(fs::read_dir(&state).map(drop)), denied);
            assert_eq!(kind(fs::write(models.join("b"), "x")), denied);
            assert_eq!(kind(fs::remove_file(models.join("a"))), denied);
            assert_eq!(kind(fs::read("/etc/passwd").map(drop)), denied);
            assert_eq!(kind(fs::read("/proc/1/cmdline").map(drop)), denied);
            fs::write(plans.join("part"), "x").unwrap();
            fs::rename(plans.join("part"), plans.join("plan")).unwrap();
            fs::read_to_string("/proc/meminfo").unwrap();
            fs::read_to_string("/proc/self/status").unwrap();
            fs::read_dir("/usr").unwrap();
        });
    }

    #[test]
    fn a_folder_that_is_named_within_the_state_is_meant() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().canonicalize().unwrap();
        let kept = state.join("kept");
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("copy"), "x").unwrap();
        fs::write(state.join("token"), "x").unwrap();
        confined(confinement(&[&kept], &[], &[&state]), move || {
            fs::read(kept.join("copy")).unwrap();
            fs::read(state.join("token")).unwrap_err();
        });
    }

    #[test]
    fn a_driver_writes_the_names_of_its_threads() {
        let nvidia = |drives_nvidia| Confinement {
            drives_nvidia,
            ..confinement(&[], &[], &[])
        };
        let names = || {
            let thread = std::thread::spawn(|| fs::write("/proc/thread-self/comm", "cuda"));
            thread.join().unwrap()
        };
        confined(nvidia(true), move || {
            names().unwrap();
            fs::write("/proc/self/oom_score_adj", "0").unwrap_err();
            fs::read_to_string("/proc/1/comm").unwrap(); // which programs are on the card
        });
        confined(nvidia(false), move || names().unwrap_err());
    }
}
