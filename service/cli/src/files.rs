//! Files of results: their names and formats. A file that exists is not overwritten.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::v1;
use media::pictures::{self, PictureFormat};

use crate::CliError;
use crate::arguments::MediumChoice;
use crate::destination::{Part, check_files, check_folder, is_stdout, is_stream, stream, write, write_to};
use crate::results::Arrived;

/// Destination of the results of a command.
#[derive(Clone, Debug)]
pub(super) struct Target {
    place: Place,
    medium: MediumChoice,
    force: bool,
    /// The pipe or the device, from the check on.
    stream: Option<Arc<File>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Stdout,
    /// This pipe or device.
    Stream(PathBuf),
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
    /// The ending of its files, if it has another than the destination: the sound of a film is beside its frames.
    pub(super) ending: Option<&'a str>,
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
            Some(out) if is_stdout(out) => Place::Stdout,
            Some(out) => {
                let path = PathBuf::from(out);
                match path.extension() {
                    _ if is_stream(&path) => Place::Stream(path),
                    _ if path.is_dir() || out.ends_with('/') => Place::Folder(path),
                    None => Place::Folder(path),
                    Some(_) => Place::File(path),
                }
            }
        };
        let target = Target {
            place,
            medium,
            force,
            stream: None,
        };
        if let Some(ending) = target.ending() {
            check_ending(&ending, out.unwrap_or_default(), medium)?;
        }
        Ok(target)
    }

    /// The ending of the file, or of the pipe or device where its name has one.
    fn ending(&self) -> Option<String> {
        match &self.place {
            Place::File(path) | Place::Stream(path) => {
                let ending = path.extension()?.to_string_lossy();
                Some(ending.to_ascii_lowercase())
            }
            Place::Folder(_) | Place::Stdout => None,
        }
    }

    /// The format in which films are requested: that of the file, or raw frames, from which an animated PNG is made here.
    pub(super) fn film_format(&self) -> v1::FilmFormat {
        match self.ending().as_deref() {
            None | Some("mp4") => v1::FilmFormat::Mp4,
            Some(_) => v1::FilmFormat::RawFrames,
        }
    }

    /// The format in which tracks are requested: that of the file.
    pub(super) fn track_format(&self) -> v1::AudioFormat {
        match self.ending().as_deref() {
            Some("flac") => v1::AudioFormat::Flac,
            _ => v1::AudioFormat::Wav,
        }
    }

    pub(super) fn is_stdout(&self) -> bool {
        self.place == Place::Stdout
    }

    /// Refuses what would fail when it is written, before anything is generated: an existing file, a folder in which none can be
    /// written, a pipe that nobody reads, several results for one pipe. Names of tracks are not known yet, and not checked.
    pub(super) fn check(&mut self, results: u32) -> Result<(), CliError> {
        match &self.place {
            Place::Stdout if results > 1 => Err(one_alone("standard output")),
            Place::Stream(path) if results > 1 => Err(one_alone(&path.display().to_string())),
            Place::Stdout => Ok(()),
            Place::Stream(path) => {
                self.stream = Some(Arc::new(stream(path)?));
                Ok(())
            }
            Place::Folder(folder) => check_folder(folder),
            Place::File(path) => {
                let paths = (0..results).map(|item| numbered(path, item, results, ""));
                check_files(paths, self.force)
            }
        }
    }

    /// The file of a result, in the format of its ending.
    pub(super) fn encode(&self, result: &Arrived) -> Result<Vec<u8>, CliError> {
        let file = result.file().map_err(CliError::Failed)?;
        let encoding = match self.medium {
            MediumChoice::Image => self.ending().and_then(|ending| encoding_of(&ending)),
            MediumChoice::Video | MediumChoice::Audio => None,
        };
        match encoding {
            Some(encoding) => pictures::encode_as(encoding, &file).map_err(CliError::Failed),
            None => Ok(file),
        }
    }

    /// Writes a result, and returns its path.
    pub(super) fn write(&self, what: &Writing<'_>, contents: &[u8]) -> Result<PathBuf, CliError> {
        match &self.place {
            Place::Stdout => {
                std::io::stdout().write_all(contents)?;
                Ok(PathBuf::from("-"))
            }
            Place::Stream(path) => {
                match &self.stream {
                    Some(stream) => write_to(stream, path, contents)?,
                    None => write(path, contents, self.force)?,
                }
                Ok(path.clone())
            }
            Place::File(path) => {
                let mut path = numbered(path, what.item, what.of, what.track);
                if let Some(ending) = what.ending {
                    path.set_extension(ending);
                }
                write(&path, contents, self.force)?;
                Ok(path)
            }
            Place::Folder(folder) => {
                let stem = format!("{}-{}{}", slug(what.model), what.seed, track_suffix(what.track));
                let ending = what.ending.unwrap_or_else(|| self.medium.ending());
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

fn one_alone(place: &str) -> CliError {
    CliError::Usage(format!("{place} takes one result: use -o FOLDER for several"))
}

/// The encoding of a picture's ending; `None`: PNG, which the service sends.
fn encoding_of(ending: &str) -> Option<PictureFormat> {
    match ending {
        "jpg" | "jpeg" => Some(PictureFormat::Jpeg),
        "webp" => Some(PictureFormat::WebP),
        _ => None,
    }
}

fn check_ending(ending: &str, out: &str, medium: MediumChoice) -> Result<(), CliError> {
    let (what, endings): (_, &[&str]) = match medium {
        MediumChoice::Image => ("a picture", &["png", "jpg", "jpeg", "webp"]),
        MediumChoice::Video => ("a film", &["mp4", "apng", "png"]),
        MediumChoice::Audio => ("a track", &["wav", "flac"]),
    };
    if endings.contains(&ending) {
        return Ok(());
    }
    let known: Vec<String> = endings.iter().map(|ending| format!(".{ending}")).collect();
    Err(CliError::Usage(format!(
        "{out}: {what} is written as {}, not as .{ending}",
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
            ending: None,
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
    fn the_sound_of_a_film_is_beside_its_frames() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("wave.apng");
        let what = Writing {
            item: 0,
            of: 1,
            track: "sound",
            ending: Some("wav"),
            model: "ovi",
            seed: 7,
        };
        let named = Target::of(path.to_str(), MediumChoice::Video, false).unwrap();
        assert_eq!(
            named.write(&what, b"x").unwrap(),
            folder.path().join("wave-sound.wav")
        );
        let any = Target::of(folder.path().to_str(), MediumChoice::Video, false).unwrap();
        assert_eq!(
            any.write(&what, b"x").unwrap(),
            folder.path().join("ovi-7-sound.wav")
        );
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
