//! Where results go: under which names, in which format, and never over a file that is there.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use super::CliError;
use super::arguments::MediumChoice;
use super::results::Arrived;
use crate::pictures::{self, Encoding};

/// Where the results of a command go.
#[derive(Clone, Debug)]
pub(super) struct Target {
    place: Place,
    medium: MediumChoice,
    force: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Stdout,
    /// Under names of ours in this folder.
    Folder(PathBuf),
    /// This one; several are numbered beside it.
    File(PathBuf),
}

/// What one result is called by.
pub(super) struct Writing<'a> {
    /// Its number among those of the command, and how many they are.
    pub(super) item: u32,
    pub(super) of: u32,
    /// Of an item with several tracks.
    pub(super) track: &'a str,
    pub(super) model: &'a str,
    pub(super) seed: u64,
}

impl Target {
    /// What `-o` says; without it, the folder that one is in.
    ///
    /// # Errors
    /// When the file's name promises what is not written.
    pub(super) fn of(out: Option<&str>, medium: MediumChoice, force: bool) -> Result<Target, CliError> {
        let place = match out {
            None => Place::Folder(PathBuf::new()),
            Some("-") => Place::Stdout,
            Some(out) => {
                let path = PathBuf::from(out);
                match path.extension() {
                    _ if path.is_dir() || out.ends_with('/') => Place::Folder(path),
                    None => Place::Folder(path),
                    Some(_) => Place::File(path),
                }
            }
        };
        if let Place::File(path) = &place {
            check_ending(path, medium)?;
        }
        Ok(Target { place, medium, force })
    }

    pub(super) fn is_stdout(&self) -> bool {
        self.place == Place::Stdout
    }

    /// Refuses before anything is generated what would be refused when it is written. Tracks have names of their own, which
    /// are not known yet.
    pub(super) fn check(&self, results: u32) -> Result<(), CliError> {
        let Place::File(path) = &self.place else {
            return Ok(());
        };
        let there = (0..results)
            .map(|item| numbered(path, item, results, ""))
            .find(|path| path.is_file());
        match there {
            Some(path) if !self.force => Err(CliError::Exists(path.display().to_string())),
            _ => Ok(()),
        }
    }

    /// The file of a result, in the format that its name promises.
    pub(super) fn encode(&self, result: &Arrived) -> Result<Vec<u8>, CliError> {
        let file = result.file().map_err(CliError::Failed)?;
        match (&self.place, self.medium) {
            (Place::File(path), MediumChoice::Image) => match encoding_of(path) {
                Some(encoding) => pictures::encode_as(encoding, &file).map_err(CliError::Failed),
                None => Ok(file),
            },
            _ => Ok(file),
        }
    }

    /// Writes a result; the name of its file.
    pub(super) fn write(&self, what: &Writing<'_>, contents: &[u8]) -> Result<PathBuf, CliError> {
        match &self.place {
            Place::Stdout => Ok(PathBuf::from("-")), // not here
            Place::File(path) => {
                let path = numbered(path, what.item, what.of, what.track);
                write(&path, contents, self.force)?;
                Ok(path)
            }
            Place::Folder(folder) => {
                let stem = format!("{}-{}{}", slug(what.model), what.seed, track_suffix(what.track));
                let ending = self.medium.ending();
                let mut number = 1_u32;
                loop {
                    let name = match number {
                        1 => format!("{stem}.{ending}"),
                        more => format!("{stem}-{more}.{ending}"),
                    };
                    let path = folder.join(name);
                    match write(&path, contents, false) {
                        Err(CliError::Exists(_)) => number += 1,
                        Err(other) => return Err(other),
                        Ok(()) => return Ok(path),
                    }
                }
            }
        }
    }
}

/// The format that a picture's name promises; `None`: what comes is that already.
fn encoding_of(path: &Path) -> Option<Encoding> {
    match ending_of(path).as_str() {
        "jpg" | "jpeg" => Some(Encoding::Jpeg),
        "webp" => Some(Encoding::WebP),
        _ => None,
    }
}

fn ending_of(path: &Path) -> String {
    path.extension()
        .unwrap_or_default()
        .to_string_lossy()
        .to_ascii_lowercase()
}

fn check_ending(path: &Path, medium: MediumChoice) -> Result<(), CliError> {
    let (what, endings): (_, &[&str]) = match medium {
        MediumChoice::Image => ("a picture", &["png", "jpg", "jpeg", "webp"]),
        MediumChoice::Video => ("a film", &["apng", "png"]),
        MediumChoice::Audio => ("a track", &["wav"]),
    };
    let ending = ending_of(path);
    if endings.contains(&ending.as_str()) {
        return Ok(());
    }
    let known: Vec<String> = endings.iter().map(|ending| format!(".{ending}")).collect();
    Err(CliError::Usage(format!(
        "{}: {what} is written as {}, not as .{ending}",
        path.display(),
        known.join(", ")
    )))
}

/// One result goes where `-o` says; several are numbered beside it. Tracks of one item are named.
fn numbered(path: &Path, item: u32, of: u32, track: &str) -> PathBuf {
    let track = track_suffix(track);
    if of <= 1 && track.is_empty() {
        return path.to_owned();
    }
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    let number = if of <= 1 {
        String::new()
    } else {
        format!("-{item:04}")
    };
    path.with_file_name(format!("{stem}{number}{track}.{extension}"))
}

fn track_suffix(track: &str) -> String {
    match track {
        "" => String::new(),
        track => format!("-{track}"),
    }
}

/// A model's name as it may stand in a file's: without its owner, and in plain characters.
fn slug(model: &str) -> String {
    let name = model.rsplit('/').next().unwrap_or_default().to_lowercase();
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || "._-".contains(c) {
            c
        } else {
            '-'
        }
    };
    let slug: String = name.chars().map(plain).take(64).collect();
    match slug.trim_matches(['.', '-']) {
        "" => "moored".to_owned(),
        slug => slug.to_owned(),
    }
}

/// Writes a file, making its folder; over one that is there by `force` alone.
pub(super) fn write(path: &Path, contents: &[u8], force: bool) -> Result<(), CliError> {
    let failed = |problem: std::io::Error| match problem.kind() {
        ErrorKind::AlreadyExists => CliError::Exists(path.display().to_string()),
        _ => CliError::File {
            path: path.display().to_string(),
            problem: problem.to_string(),
        },
    };
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).map_err(|problem| CliError::File {
            path: folder.display().to_string(),
            problem: problem.to_string(),
        })?;
    }
    // A device or a pipe holds nothing that could be lost.
    let is_free = force || path.metadata().is_ok_and(|found| !found.is_file());
    let mut options = OpenOptions::new();
    options.write(true);
    match is_free {
        true => options.create(true).truncate(true),
        false => options.create_new(true),
    };
    let mut file = options.open(path).map_err(failed)?;
    file.write_all(contents).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_go_where_they_are_told() {
        let path = |out: &str, item, of| numbered(Path::new(out), item, of, "");
        assert_eq!(path("a.png", 0, 1), Path::new("a.png"));
        assert_eq!(path("b/a.png", 2, 3), Path::new("b/a-0002.png"));
        assert_eq!(
            numbered(Path::new("a.wav"), 0, 1, "drums"),
            Path::new("a-drums.wav")
        );
        let folder = |out: &str| Target::of(Some(out), MediumChoice::Image, false).unwrap().place;
        assert_eq!(folder("folder"), Place::Folder("folder".into()));
        assert_eq!(folder("folder.d/"), Place::Folder("folder.d/".into()));
    }

    #[test]
    fn names_carry_model_and_seed_and_do_not_collide() {
        let folder = tempfile::tempdir().unwrap();
        let target = Target::of(folder.path().to_str(), MediumChoice::Image, false).unwrap();
        let what = Writing {
            item: 0,
            of: 1,
            track: "",
            model: "black-forest-labs/FLUX.1-schnell",
            seed: 7,
        };
        for name in [
            "flux.1-schnell-7.png",
            "flux.1-schnell-7-2.png",
            "flux.1-schnell-7-3.png",
        ] {
            assert_eq!(target.write(&what, b"x").unwrap(), folder.path().join(name));
        }
        assert_eq!(slug("../.."), "moored");
        assert_eq!(slug("me/Ünder der"), "nder-der");
    }

    #[test]
    fn nothing_is_overwritten_unless_it_is_forced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.png");
        write(&path, b"old", false).unwrap();
        assert!(matches!(write(&path, b"new", false), Err(CliError::Exists(_))));
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        let target = |force| Target::of(path.to_str(), MediumChoice::Image, force).unwrap();
        assert!(matches!(target(false).check(1), Err(CliError::Exists(_))));
        assert!(
            target(false).check(2).is_ok(),
            "a-0000.png and a-0001.png are free"
        );
        assert!(target(true).check(1).is_ok());
        write(&path, b"new", true).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
    }

    #[test]
    fn an_unsupported_file_ending_is_refused() {
        for (out, medium) in [
            ("a.gif", MediumChoice::Image),
            ("a.wav", MediumChoice::Image),
            ("a.mp4", MediumChoice::Video),
            ("a.mp3", MediumChoice::Audio),
        ] {
            assert!(Target::of(Some(out), medium, false).is_err(), "{out}");
        }
        assert!(Target::of(Some("a.JPG"), MediumChoice::Image, false).is_ok());
    }
}
