//! Options of `moored play`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::generation::more_than_zero;
use super::{
    Formats, Generate, JobSettings, MediumChoice, OutputArguments, Prompts, SamplingArguments, Settings,
};

#[derive(Debug, Args)]
pub(crate) struct Play {
    /// The prompt: style, instruments, mood; read from standard input when it is left out or "-"
    pub(crate) prompt: Option<String>,
    /// A model of the service, a short name, or OWNER/NAME [default: the service's for pictures, films or music]
    #[arg(short, long, value_name = "ID")]
    pub(crate) model: Option<String>,
    /// Download the model if it is missing, without asking
    #[arg(long)]
    pub(crate) pull: bool,
    /// Length in seconds [default: that of the source, else the model's]
    #[arg(long, value_parser = more_than_zero, help_heading = "Track")]
    pub(crate) seconds: Option<f32>,
    /// File with the lyrics, with marks such as `[verse]` and `[chorus]`
    #[arg(long, value_name = "FILE", help_heading = "Track")]
    pub(crate) lyrics: Option<PathBuf>,
    /// The WAV or FLAC file that the task works on, or to start from
    #[arg(long, value_name = "FILE", help_heading = "Track")]
    pub(crate) source: Option<PathBuf>,
    /// A WAV or FLAC file to take the timbre from
    #[arg(long, value_name = "FILE", help_heading = "Track")]
    pub(crate) reference: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) track: TrackSettings,
    #[command(flatten)]
    pub(crate) prompts: Prompts,
    #[command(flatten)]
    pub(crate) formats: Formats,
    #[command(flatten)]
    pub(crate) sampling: SamplingArguments,
    #[command(flatten)]
    pub(crate) job: JobSettings,
    #[command(flatten)]
    pub(crate) output: OutputArguments,
}

/// What is of tracks alone.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Track")]
pub(crate) struct TrackSettings {
    /// What to make of the source [default: a new track]
    #[arg(long, value_enum, requires = "source")]
    pub(crate) task: Option<TaskChoice>,
    /// Repaint and lego: where the part to generate begins [default: at the start]
    #[arg(long, value_name = "SECONDS", requires = "task")]
    pub(crate) from: Option<f32>,
    /// Repaint and lego: where it ends [default: at the end of the source]
    #[arg(long, value_name = "SECONDS", requires = "task")]
    pub(crate) to: Option<f32>,
    /// Extract, lego and complete: a track, such as vocals or drums; may be repeated for complete
    #[arg(long = "track", value_name = "NAME", requires = "task")]
    pub(crate) tracks: Vec<String>,
    /// Beats per minute [default: the model's choice]
    #[arg(long)]
    pub(crate) bpm: Option<u32>,
    /// Key and scale, such as "C major" [default: the model's choice]
    #[arg(long)]
    pub(crate) key: Option<String>,
    /// Beats per bar, such as 4 [default: the model's choice]
    #[arg(long, value_name = "BEATS")]
    pub(crate) time_signature: Option<String>,
    /// Language of the lyrics, such as en
    #[arg(long)]
    pub(crate) language: Option<String>,
}

/// What to make of a track.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TaskChoice {
    /// Generate a part of it again
    Repaint,
    /// The same melody and rhythm in another style
    Cover,
    /// Only one of its tracks
    Extract,
    /// Add one more track that fits it
    Lego,
    /// Add several tracks to it
    Complete,
}

impl Play {
    /// The same as `moored generate` takes it.
    pub(crate) fn into_generate(self) -> Generate {
        Generate {
            prompt: self.prompt,
            model: self.model,
            pull: self.pull,
            prompts: self.prompts,
            settings: Settings {
                formats: self.formats,
                sampling: self.sampling,
                job: self.job,
                track: self.track,
                medium: Some(MediumChoice::Audio),
                seconds: self.seconds,
                lyrics: self.lyrics,
                init: self.source,
                reference: self.reference.into_iter().collect(),
                ..Settings::default()
            },
            output: self.output,
        }
    }
}
