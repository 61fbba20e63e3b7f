//! Files of results: their names and formats. A file that exists is not overwritten.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use api::v1;
use media::pictures::{self, PictureFormat};

use crate::CliError;
use crate::arguments::MediumChoice;
use crate::results::Arrived;

/// Bytes that are written to probe a folder: a disk without room for a picture counts as full.
const PROBE_BYTES: usize = 1 << 20;

/// Destination of the results of a command.
#[derive(Clone, Debug)]
pub(super) struct Target {
    place: Place,
    medium: MediumChoice,
    force: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Stdout,
    /// This folder, with generated names.
    Folder(PathBuf),
    /// This file; several results are numbered beside it.
    File(PathBuf),
}

/// Parts of the name of one result.
pub(super) struct Writing<'a> {
    /// Number from 0 among the results of the command, of which there are `of`.
    pub(super) item: u32,
    pub(super) of: u32,
    /// Name of the track in an item with several; else empty.
    pub(super) track: &'a str,
    pub(super) model: &'a str,
    pub(super) seed: u64,
}

impl Target {
    /// The destination of `-o`; without it, the current folder.
    ///
    /// # Errors
    /// When the ending of the file is not of a format of the medium.
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

    /// The format in which films are requested: that of the file, or raw frames, from which an animated PNG is made here.
    pub(super) fn film_format(&self) -> v1::FilmFormat {
        match &self.place {
            Place::File(path) if ending_of(path) != "mp4" => v1::FilmFormat::RawFrames,
            Place::File(_) | Place::Folder(_) | Place::Stdout => v1::FilmFormat::Mp4,
        }
    }

    /// The format in which tracks are requested: that of the file.
    pub(super) fn track_format(&self) -> v1::AudioFormat {
        match &self.place {
            Place::File(path) if ending_of(path) == "flac" => v1::AudioFormat::Flac,
            Place::File(_) | Place::Folder(_) | Place::Stdout => v1::AudioFormat::Wav,
        }
    }

    pub(super) fn is_stdout(&self) -> bool {
        self.place == Place::Stdout
    }

    /// Refuses an existing file, and a folder in which none can be written, before anything is generated. Names of tracks are
    /// not known yet, and not checked.
    pub(super) fn check(&self, results: u32) -> Result<(), CliError> {
        let path = match &self.place {
            Place::Stdout => return Ok(()),
            Place::Folder(folder) => return try_folder(folder),
            Place::File(path) => path,
        };
        if !path.exists() {
            try_folder(path.parent().unwrap_or(Path::new("")))?;
        }
        let there = (0..results)
            .map(|item| numbered(path, item, results, ""))
            .find(|path| path.is_file());
        match there {
            Some(path) if !self.force => Err(CliError::Exists(path.display().to_string())),
            _ => Ok(()),
        }
    }

    /// The file of a result, in the format of its ending.
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

    /// Writes a result, and returns its path.
    pub(super) fn write(&self, what: &Writing<'_>, contents: &[u8]) -> Result<PathBuf, CliError> {
        match &self.place {
            Place::Stdout => Ok(PathBuf::from("-")), // the caller writes to standard output
            Place::File(path) => {
                let path = numbered(path, what.item, what.of, what.track);
                write(&path, contents, self.force)?;
                Ok(path)
            }
            Place::Folder(folder) => {
                let stem = format!("{}-{}{}", slug(what.model), what.seed, track_suffix(what.track));
                let ending = self.medium.ending();
                let name = |number: u32| match number {
                    1 => folder.join(format!("{stem}.{ending}")),
                    more => folder.join(format!("{stem}-{more}.{ending}")),
                };
                let part = Part::write(&name(1), contents)?;
                for number in 1.. {
                    let path = name(number);
                    match part.name_unless_taken(&path) {
                        Err(CliError::Exists(_)) => {}
                        Err(other) => return Err(other),
                        Ok(()) => return Ok(path),
                    }
                }
                Err(CliError::Exists(name(1).display().to_string()))
            }
        }
    }
}

/// The encoding of a picture's ending; `None`: PNG, which the service sends.
fn encoding_of(path: &Path) -> Option<PictureFormat> {
    match ending_of(path).as_str() {
        "jpg" | "jpeg" => Some(PictureFormat::Jpeg),
        "webp" => Some(PictureFormat::WebP),
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
        MediumChoice::Video => ("a film", &["mp4", "apng", "png"]),
        MediumChoice::Audio => ("a track", &["wav", "flac"]),
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

/// The path of a result: that of `-o`, with a number if there are several, and with the name of its track if it has one.
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
        track => format!("-{}", slug(track)), // a service names it, and it must not lead out of the folder
    }
}

/// The name of a model or a track in a file name: without its owner or folder, in ASCII letters, digits and `._-`.
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

/// Writes a file, and makes its folder. Only `force` overwrites a file.
pub(super) fn write(path: &Path, contents: &[u8], force: bool) -> Result<(), CliError> {
    // A device or a pipe is written to directly, as it holds nothing that could be lost.
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        let opened = OpenOptions::new().write(true).open(path);
        let written = opened.and_then(|mut there| there.write_all(contents));
        return written.map_err(|problem| CliError::file(path, problem));
    }
    match force {
        true => {
            let target = target_of(path);
            Part::write(&target, contents)?.name(&target)
        }
        false => Part::write(path, contents)?.name_unless_taken(path),
    }
}

/// A file that has been written and has no name yet: a full disk leaves neither a part of a file nor an old one emptied. It
/// lies beside the file that it becomes, since a file keeps its file system when it is renamed. Dropped, it is removed.
struct Part(PathBuf);

impl Part {
    /// Writes it beside a file, and makes the folder of both.
    fn write(path: &Path, contents: &[u8]) -> Result<Part, CliError> {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(|problem| CliError::file(folder, problem))?;
        }
        let beside = beside(path);
        let failed = |problem| CliError::file(path, problem);
        let _ = std::fs::remove_file(&beside); // left by a killed process with the same id
        let created = OpenOptions::new().write(true).create_new(true).open(&beside);
        let mut file = created.map_err(failed)?;
        let part = Part(beside);
        file.write_all(contents).map_err(failed)?;
        Ok(part)
    }

    /// Renames it to its final name, and replaces a file of that name.
    fn name(&self, path: &Path) -> Result<(), CliError> {
        std::fs::rename(&self.0, path).map_err(|problem| CliError::file(path, problem))
    }

    /// Renames it to its final name, unless a file of that name exists.
    fn name_unless_taken(&self, path: &Path) -> Result<(), CliError> {
        rename_unless_there(&self.0, path).map_err(|problem| match problem.kind() {
            ErrorKind::AlreadyExists => CliError::Exists(path.display().to_string()),
            _ => CliError::file(path, problem),
        })
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0); // it is gone if it was renamed; else the error of the write is reported
    }
}

/// A name beside a file, of this process alone.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.part", std::process::id()))
}

/// The file that a path names: a link is followed, as it is when a file is overwritten in place.
fn target_of(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// Renames a file, unless a file of that name exists.
fn rename_unless_there(from: &Path, to: &Path) -> std::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        // The file system lacks this call. Here two commands at the same moment could both find the name free.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) if to.symlink_metadata().is_err() => {
            std::fs::rename(from, to)
        }
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => Err(ErrorKind::AlreadyExists.into()),
        Err(problem) => Err(problem.into()),
    }
}

/// Checks that a file can be written in a folder, before anything is computed for it.
fn try_folder(folder: &Path) -> Result<(), CliError> {
    let folder = match folder.as_os_str().is_empty() {
        true => Path::new("."),
        false => folder,
    };
    if !folder.exists() {
        return match folder.parent() {
            Some(above) => try_folder(above),
            None => Ok(()),
        };
    }
    let probe = folder.join(format!(".moored.{}.part", std::process::id()));
    let tried = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&probe)
        .and_then(|mut file| file.write_all(&[0; PROBE_BYTES]));
    let _ = std::fs::remove_file(&probe); // if it is there
    tried.map_err(|problem| CliError::file(folder, problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_option_sets_the_destination() {
        let path = |out: &str, item, of| numbered(Path::new(out), item, of, "");
        assert_eq!(path("a.png", 0, 1), Path::new("a.png"));
        assert_eq!(path("b/a.png", 2, 3), Path::new("b/a-0002.png"));
        assert_eq!(
            numbered(Path::new("a.wav"), 0, 1, "../../drums"),
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
        let files = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(files, 3, "no part stays");
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
    fn the_target_of_a_link_is_overwritten_by_a_file_that_was_written_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let (links, files) = (folder.path().join("links"), folder.path().join("files"));
        std::fs::create_dir(&links).unwrap();
        std::fs::create_dir(&files).unwrap();
        let (link, file) = (links.join("a.png"), files.join("b.png"));
        std::fs::write(&file, b"old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        // A folder in place of the part is in the way there alone.
        std::fs::create_dir(beside(&link)).unwrap();
        write(&link, b"new", true).unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"new");
        assert!(link.is_symlink());
        assert_eq!(std::fs::read_dir(&files).unwrap().count(), 1, "no part stays");
        std::fs::create_dir(beside(&std::fs::canonicalize(&file).unwrap())).unwrap();
        assert!(write(&link, b"newer", true).is_err());
        assert_eq!(std::fs::read(&file).unwrap(), b"new");
    }

    #[test]
    fn an_unsupported_file_ending_is_refused() {
        for (out, medium) in [
            ("a.gif", MediumChoice::Image),
            ("a.wav", MediumChoice::Image),
            ("a.mp4", MediumChoice::Image),
            ("a.mov", MediumChoice::Video),
            ("a.mp3", MediumChoice::Audio),
        ] {
            assert!(Target::of(Some(out), medium, false).is_err(), "{out}");
        }
        assert!(Target::of(Some("a.JPG"), MediumChoice::Image, false).is_ok());
    }

    #[test]
    fn a_film_is_an_mp4_unless_its_file_is_an_animated_png() {
        let sent = |out| Target::of(out, MediumChoice::Video, false).unwrap().film_format();
        for out in [Some("a.mp4"), Some("a.MP4"), Some("folder/"), Some("-"), None] {
            assert_eq!(sent(out), v1::FilmFormat::Mp4, "{out:?}");
        }
        for out in [Some("a.apng"), Some("a.png")] {
            assert_eq!(sent(out), v1::FilmFormat::RawFrames, "{out:?}");
        }
    }

    #[test]
    fn a_track_is_a_wav_unless_its_file_is_a_flac() {
        let sent = |out| {
            Target::of(out, MediumChoice::Audio, false)
                .unwrap()
                .track_format()
        };
        for out in [Some("a.wav"), Some("folder/"), Some("-"), None] {
            assert_eq!(sent(out), v1::AudioFormat::Wav, "{out:?}");
        }
        assert_eq!(sent(Some("a.FLAC")), v1::AudioFormat::Flac);
    }
}
