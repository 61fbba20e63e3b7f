//! Options of the commands that generate: what is generated, how it is sampled, how its job is run, and where results go.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use hub::catalogue::Makes;
use model::{Sampler, Sampling};
use residency::Bytes;

use super::formats::Formats;
use super::play::TrackSettings;

/// Prompts from a file.
#[derive(Debug, Args)]
pub(crate) struct Prompts {
    /// File with one prompt per line, "-" for standard input; each is generated in turn
    #[arg(long = "prompts", value_name = "FILE", conflicts_with = "prompt")]
    pub(crate) file: Option<PathBuf>,
}

/// Where results go.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArguments {
    /// A file (.png, .jpg, .webp, .mp4, .apng, .wav, .flac), a folder, or - for standard output [default: MODEL-SEED.png, .mp4 or .wav]
    #[arg(short, long, value_name = "PATH")]
    pub(crate) out: Option<String>,
    /// Overwrite existing files
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Leave prompt, seed and settings out of the file
    #[arg(long)]
    pub(crate) no_metadata: bool,
}

/// Where what was fetched is written.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct FetchOutput {
    /// A file (.png, .jpg, .webp, .mp4, .wav, .flac), a folder, or - for standard output [default: MODEL-SEED.png, .mp4 or .wav]
    #[arg(short, long, value_name = "PATH")]
    pub(crate) out: Option<String>,
    /// Overwrite existing files
    #[arg(short, long)]
    pub(crate) force: bool,
}

/// What is generated, and how its job is run.
#[derive(Debug, Default, Args)]
pub(crate) struct Settings {
    #[command(flatten)]
    pub(crate) formats: Formats,
    /// Width in pixels
    #[arg(short = 'W', long, help_heading = "Picture")]
    pub(crate) width: Option<u32>,
    /// Height in pixels
    #[arg(short = 'H', long, help_heading = "Picture")]
    pub(crate) height: Option<u32>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArguments,
    /// Regenerate a picture, film or track from the settings stored in its file. Other options override them
    #[arg(long, value_name = "FILE", help_heading = "Picture")]
    pub(crate) from: Option<PathBuf>,
    /// The picture to start from: image to image; for a film, its first frame; for a track, the WAV or FLAC file to start from
    #[arg(long, value_name = "FILE", help_heading = "Picture")]
    pub(crate) init: Option<PathBuf>,
    /// Film: the picture that it ends with, where the model takes one (FramePack)
    #[arg(long, value_name = "PICTURE", help_heading = "Picture")]
    pub(crate) end: Option<PathBuf>,
    /// Inpainting: a picture that is white where --init changes, and black where it stays exactly as it is
    #[arg(long, value_name = "PICTURE", requires = "init", help_heading = "Picture")]
    pub(crate) mask: Option<PathBuf>,
    /// Editing: the picture to edit (FLUX.1 Kontext); for a track, a WAV or FLAC file to take the timbre from
    #[arg(long, value_name = "FILE", help_heading = "Picture")]
    pub(crate) reference: Vec<PathBuf>,
    /// A ControlNet, by its name in `moored models --adapters`, and the picture that it reads; may be repeated
    #[arg(long, value_name = "NAME=PICTURE", value_parser = name_and_picture, help_heading = "Picture")]
    pub(crate) control: Vec<(String, PathBuf)>,
    /// Strength of the ControlNets [default: 1]
    #[arg(long, value_name = "SCALE", requires = "control", help_heading = "Picture")]
    pub(crate) control_scale: Option<f32>,
    /// The part of the steps in which ControlNets act, such as 0-0.6 [default: all of them]
    #[arg(long, value_name = "START-END", value_parser = start_and_end, requires = "control", help_heading = "Picture")]
    pub(crate) control_steps: Option<(f32, f32)>,
    /// Mode of a union ControlNet, from 0
    #[arg(long, value_name = "NUMBER", requires = "control", help_heading = "Picture")]
    pub(crate) control_mode: Option<u32>,
    /// What to generate [default: what the other options imply, else a picture]
    #[arg(long, value_enum, help_heading = "Film and track")]
    pub(crate) medium: Option<MediumChoice>,
    /// Film: number of frames
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Film and track")]
    pub(crate) frames: Option<u32>,
    /// Film: frames per second
    #[arg(long, value_parser = more_than_zero, help_heading = "Film and track")]
    pub(crate) fps: Option<f32>,
    /// Film: most frames to decode at a time, such as 16, 4 or 1: fewer need less memory, and give the same pixels
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Film and track")]
    pub(crate) frames_at_a_time: Option<u32>,
    /// Film and track: the length
    #[arg(long, conflicts_with = "frames", value_parser = more_than_zero, help_heading = "Film and track")]
    pub(crate) seconds: Option<f32>,
    /// Track: file with the lyrics, with marks such as `[verse]` and `[chorus]`
    #[arg(long, value_name = "FILE", help_heading = "Film and track")]
    pub(crate) lyrics: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) job: JobSettings,
    /// Of `moored play` alone.
    #[arg(skip)]
    pub(crate) track: TrackSettings,
}

/// How sampling goes.
#[derive(Debug, Default, Args)]
pub(crate) struct SamplingArguments {
    /// Denoising steps
    #[arg(short, long, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Sampling")]
    pub(crate) steps: Option<u32>,
    /// Guidance scale
    #[arg(short, long, help_heading = "Sampling")]
    pub(crate) guidance: Option<f32>,
    /// What the result is led away from; it needs --true-guidance
    #[arg(
        long,
        visible_alias = "negative-prompt",
        value_name = "PROMPT",
        help_heading = "Sampling"
    )]
    pub(crate) negative: Option<String>,
    /// Over 1: two passes in every step, away from the negative prompt by this scale
    #[arg(long, value_name = "SCALE", help_heading = "Sampling")]
    pub(crate) true_guidance: Option<f32>,
    /// Picture: how noise is removed, of a model with several ways: euler, euler_ancestral, dpmpp_2m_karras
    #[arg(long, value_name = "NAME", value_parser = sampler_named, help_heading = "Sampling")]
    pub(crate) sampler: Option<Sampler>,
    /// Leave out passes that change less than this, such as 0.08: faster, and not quite the same result [default: none]
    #[arg(long, value_name = "CHANGE", help_heading = "Sampling")]
    pub(crate) step_cache: Option<f32>,
    /// Picture, film: attention in fp8, on cards that have it: faster, and not quite the same result
    #[arg(long, help_heading = "Sampling")]
    pub(crate) fp8_attention: bool,
    /// Film: on how many cards of the service it is sampled together, 1 or 2: each computes a part of it [default: 1]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Sampling")]
    pub(crate) cards: Option<u32>,
    /// Seed; item i uses seed + i [default: random]
    #[arg(long, help_heading = "Sampling")]
    pub(crate) seed: Option<u64>,
    /// How many pictures, films or tracks
    #[arg(short = 'n', long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Sampling")]
    pub(crate) count: u32,
    /// Longest prompt, in tokens of the large text encoder
    #[arg(long, value_name = "TOKENS", help_heading = "Sampling")]
    pub(crate) max_sequence_length: Option<u32>,
    /// How strongly to change the start picture, film or track: more than 0, up to 1
    #[arg(long, help_heading = "Sampling")]
    pub(crate) strength: Option<f32>,
}

impl SamplingArguments {
    /// What the options say.
    pub(crate) fn sampling(&self) -> Sampling {
        Sampling {
            steps: self.steps,
            guidance: self.guidance,
            negative_prompt: self.negative.clone(),
            true_guidance: self.true_guidance,
            sampler: self.sampler,
            step_cache: self.step_cache,
            fp8_attention: self.fp8_attention.then_some(true),
            cards: self.cards,
            seed: self.seed,
            max_sequence_length: self.max_sequence_length,
            strength: self.strength,
        }
    }
}

/// A sampler by its name in requests.
fn sampler_named(name: &str) -> Result<Sampler, String> {
    name.parse()
}

/// A length of time.
pub(crate) fn time(text: &str) -> Result<humantime::Duration, String> {
    text.parse()
        .map_err(|_| "a number with its unit is wanted, such as 30s, 5m, 2h or 1h30m".to_owned())
}

/// A number for which 0 would mean that none is given.
pub(crate) fn more_than_zero(text: &str) -> Result<f32, String> {
    let number: f32 = text.parse().map_err(|_| "a number is wanted".to_owned())?;
    match number > 0.0 {
        true => Ok(number),
        false => Err("a number above 0 is wanted".to_owned()),
    }
}

/// How a job is run.
#[derive(Debug, Default, Args)]
pub(crate) struct JobSettings {
    /// Start even if the plan says that memory is short; if it runs out, only this job fails
    #[arg(long, help_heading = "Job")]
    pub(crate) allow_low_memory: bool,
    /// GPU memory to keep free for other programs while the job runs, e.g. 2GiB
    #[arg(long, value_name = "SIZE", value_parser = gpu::parse_bytes, help_heading = "Job")]
    pub(crate) headroom: Option<Bytes>,
    /// How long to wait for memory that other programs hold, e.g. 10s
    #[arg(long, value_name = "TIME", value_parser = time, help_heading = "Job")]
    pub(crate) patience: Option<humantime::Duration>,
    /// How long to ask again, as often as the service says, where its queue is full or a limit is reached, e.g. 5m
    #[arg(long, value_name = "TIME", value_parser = time, help_heading = "Job")]
    pub(crate) retry: Option<humantime::Duration>,
    /// Priority in the queue
    #[arg(long, value_enum, default_value_t = PriorityChoice::Normal, help_heading = "Job")]
    pub(crate) priority: PriorityChoice,
    /// Your name in the job list, and for fair sharing [env: MOORED_CLIENT] (default: user@host)
    #[arg(long, value_name = "NAME", help_heading = "Job")]
    pub(crate) client: Option<String>,
    /// The card to run on, as `moored status` names it
    #[arg(long, help_heading = "Job")]
    pub(crate) card: Option<String>,
    /// Print the job's id and leave: the job goes on, outlives a restart of the service, and `moored fetch` gets its results
    #[arg(long, help_heading = "Job")]
    pub(crate) detach: bool,
}

/// Medium of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum MediumChoice {
    /// A picture, written as PNG
    Image,
    /// A film, written as MP4 or animated PNG
    Video,
    /// A track, written as WAV or FLAC
    Audio,
}

impl From<MediumChoice> for Makes {
    fn from(medium: MediumChoice) -> Makes {
        match medium {
            MediumChoice::Image => Makes::Image,
            MediumChoice::Video => Makes::Video,
            MediumChoice::Audio => Makes::Audio,
        }
    }
}

impl From<Makes> for MediumChoice {
    fn from(makes: Makes) -> MediumChoice {
        match makes {
            Makes::Image => MediumChoice::Image,
            Makes::Video => MediumChoice::Video,
            Makes::Audio => MediumChoice::Audio,
        }
    }
}

impl MediumChoice {
    /// The default ending of its files.
    pub(crate) fn ending(self) -> &'static str {
        match self {
            MediumChoice::Image => "png",
            MediumChoice::Video => "mp4",
            MediumChoice::Audio => "wav",
        }
    }
}

fn name_and_picture(text: &str) -> Result<(String, PathBuf), String> {
    // A name may have this character too: the picture is the longest path that is there.
    let splits = text
        .match_indices('=')
        .map(|(at, _)| (&text[..at], &text[at + 1..]))
        .filter(|(name, picture)| !name.is_empty() && !picture.is_empty());
    let splits: Vec<(&str, &str)> = splits.collect();
    let there = splits
        .iter()
        .find(|(_, picture)| PathBuf::from(picture).is_file());
    let (name, picture) = there
        .or(splits.first())
        .ok_or("write a ControlNet and its picture, such as canny=edges.png")?;
    Ok(((*name).to_owned(), picture.into()))
}

fn start_and_end(text: &str) -> Result<(f32, f32), String> {
    let number = |text: &str| text.parse::<f32>().ok();
    let both = text.split_once('-');
    let both = both.and_then(|(start, end)| Some((number(start)?, number(end)?)));
    both.ok_or_else(|| "write two parts of the steps, such as 0-0.6".to_owned())
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(crate) enum PriorityChoice {
    Low,
    #[default]
    Normal,
    High,
}
