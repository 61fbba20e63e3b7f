//! Requests from the command line.

use std::io::IsTerminal as _;
use std::path::Path;

use api::v1;
use bytes::Bytes;
use config::bounded;
use media::Recipe;
use model::{Sampler, Sampling};

use crate::CliError;
use crate::arguments::{JobSettings, MediumChoice, PriorityChoice, Settings, TaskChoice};
use crate::millis;

/// A request for a result of any medium.
#[derive(Clone, Debug)]
pub(super) enum Asked {
    Generate(v1::GenerateImageRequest),
    Video(v1::GenerateVideoRequest),
    Audio(v1::GenerateAudioRequest),
}

impl From<Asked> for v1::plan_request::Request {
    fn from(asked: Asked) -> v1::plan_request::Request {
        match asked {
            Asked::Generate(image) => v1::plan_request::Request::Generate(image),
            Asked::Video(video) => v1::plan_request::Request::Video(video),
            Asked::Audio(audio) => v1::plan_request::Request::Audio(audio),
        }
    }
}

/// Parts of a request besides its prompt and its settings.
pub(super) struct Wanted<'a> {
    pub(super) medium: MediumChoice,
    /// How films are sent.
    pub(super) film: v1::FilmFormat,
    /// How tracks are sent.
    pub(super) track: v1::AudioFormat,
    /// Id of the model; `None`: the recipe's, else the service's default.
    pub(super) model: Option<&'a str>,
    /// The recipe of `--from`.
    pub(super) recipe: Option<Recipe>,
    /// Client name, unless the settings have one.
    pub(super) client: &'a str,
}

/// Refuses options that do not apply to the medium.
fn check_options(options: &Settings, medium: MediumChoice) -> Result<(), CliError> {
    let of_film = [
        ("--frames", options.frames.is_some()),
        ("--fps", options.fps.is_some()),
        ("--end", options.end.is_some()),
        ("--frames-at-a-time", options.frames_at_a_time.is_some()),
        ("--cards", options.sampling.cards.is_some()),
    ];
    let of_time = [("--seconds", options.seconds.is_some())];
    let of_track = [("--lyrics", options.lyrics.is_some())];
    let seen = [
        ("--width", options.width.is_some()),
        ("--height", options.height.is_some()),
    ];
    let of_picture = [
        ("--mask", options.mask.is_some()),
        ("--control", !options.control.is_empty()),
    ];
    let of_pictures = [("--reference", !options.reference.is_empty())];
    let sampled = [("--fp8-attention", options.sampling.fp8_attention)];
    let (others, what) = match medium {
        MediumChoice::Image => ([&of_film[..], &of_time[..], &of_track[..]].concat(), "a picture"),
        MediumChoice::Video => (
            [&of_track[..], &of_picture[..], &of_pictures[..]].concat(),
            "a film",
        ),
        MediumChoice::Audio => (
            [&of_film[..], &seen[..], &of_picture[..], &sampled[..]].concat(),
            "a track",
        ),
    };
    match others.iter().find(|(_, given)| *given) {
        Some((option, _)) => Err(CliError::Usage(format!(
            "{option} does not apply to {what}: leave it out, or choose another --medium"
        ))),
        None => Ok(()),
    }
}

/// The medium: by the options, the file or the recipe, else a picture.
pub(super) fn medium_of(options: &Settings, out: Option<&str>, recipe: Option<&Recipe>) -> MediumChoice {
    let ending = out.map(Path::new).and_then(Path::extension);
    let ending = ending.map(|ending| ending.to_string_lossy().to_ascii_lowercase());
    let of_file = match ending.as_deref() {
        Some("wav" | "flac") => Some(MediumChoice::Audio),
        Some("mp4" | "apng") => Some(MediumChoice::Video),
        _ => None,
    };
    let of_recipe = recipe.and_then(|recipe| match (recipe.frames, recipe.seconds) {
        (Some(_), _) => Some(MediumChoice::Video),
        (None, Some(_)) => Some(MediumChoice::Audio),
        (None, None) => None,
    });
    match options.medium.or(of_file) {
        Some(medium) => medium,
        None if options.frames.is_some() || options.fps.is_some() => MediumChoice::Video,
        None if options.seconds.is_some() || options.lyrics.is_some() => MediumChoice::Audio,
        None => of_recipe.unwrap_or(MediumChoice::Image),
    }
}

impl Asked {
    pub(super) fn prompt(&self) -> &str {
        match self {
            Asked::Generate(image) => &image.prompt,
            Asked::Video(video) => &video.prompt,
            Asked::Audio(audio) => &audio.prompt,
        }
    }

    /// The same with another prompt.
    pub(super) fn with_prompt(mut self, prompt: String) -> Asked {
        match &mut self {
            Asked::Generate(image) => image.prompt = prompt,
            Asked::Video(video) => video.prompt = prompt,
            Asked::Audio(audio) => audio.prompt = prompt,
        }
        self
    }

    pub(super) fn model(&self) -> Option<&v1::ModelRef> {
        match self {
            Asked::Generate(image) => image.model.as_ref(),
            Asked::Video(video) => video.model.as_ref(),
            Asked::Audio(audio) => audio.model.as_ref(),
        }
    }

    pub(super) fn model_mut(&mut self) -> Option<&mut v1::ModelRef> {
        match self {
            Asked::Generate(image) => image.model.as_mut(),
            Asked::Video(video) => video.model.as_mut(),
            Asked::Audio(audio) => audio.model.as_mut(),
        }
    }

    /// Whether its job goes on without the command.
    pub(super) fn is_detached(&self) -> bool {
        self.options().is_some_and(|options| options.detach)
    }

    pub(super) fn options(&self) -> Option<&v1::JobOptions> {
        match self {
            Asked::Generate(image) => image.options.as_ref(),
            Asked::Video(video) => video.options.as_ref(),
            Asked::Audio(audio) => audio.options.as_ref(),
        }
    }
}

/// A request from options, over the recipe of `--from`.
pub(super) fn request_of(
    asked: &Wanted<'_>,
    prompt: String,
    options: &Settings,
    omit_metadata: bool,
) -> Result<Asked, CliError> {
    check_options(options, asked.medium)?;
    match asked.medium {
        MediumChoice::Image => picture_of(asked, prompt, options, omit_metadata),
        MediumChoice::Video => film_of(asked, prompt, options, omit_metadata),
        MediumChoice::Audio => track_of(asked, prompt, options, omit_metadata),
    }
}

fn picture_of(
    asked: &Wanted<'_>,
    prompt: String,
    options: &Settings,
    omit_metadata: bool,
) -> Result<Asked, CliError> {
    let recipe = asked.recipe.clone().unwrap_or_default();
    let pictures = Pictures::read(options, &recipe)?;
    let common = SharedFields::of(asked, options, &recipe)?;
    let (width, height) = sides(options, &recipe);
    Ok(Asked::Generate(v1::GenerateImageRequest {
        model: Some(common.model),
        prompt,
        width,
        height,
        count: options.sampling.count,
        init_image: pictures.init_image,
        mask: pictures.mask,
        references: pictures.references,
        controls: pictures.controls,
        output: v1::OutputFormat::Png.into(),
        omit_metadata,
        sampler: sampler_out(common.sampling.sampler).into(),
        fp8_attention: common.sampling.fp8_attention,
        options: Some(common.job),
        ..api::sampling_out!(v1::GenerateImageRequest, common.sampling)
    }))
}

fn sampler_out(sampler: Option<Sampler>) -> v1::Sampler {
    match sampler {
        None => v1::Sampler::Unspecified,
        Some(Sampler::Euler) => v1::Sampler::Euler,
        Some(Sampler::EulerAncestral) => v1::Sampler::EulerAncestral,
        Some(Sampler::Dpmpp2mKarras) => v1::Sampler::Dpmpp2mKarras,
    }
}

fn film_of(
    asked: &Wanted<'_>,
    prompt: String,
    options: &Settings,
    omit_metadata: bool,
) -> Result<Asked, CliError> {
    let recipe = asked.recipe.clone().unwrap_or_default();
    let pictures = Pictures::read(options, &recipe)?;
    let common = SharedFields::of(asked, options, &recipe)?;
    let (width, height) = sides(options, &recipe);
    Ok(Asked::Video(v1::GenerateVideoRequest {
        model: Some(common.model),
        prompt,
        width,
        height,
        // A length from the options takes precedence over the recipe's frames.
        frames: match options.seconds {
            Some(_) => options.frames.unwrap_or(0),
            None => options.frames.or(recipe.frames).unwrap_or(0),
        },
        seconds: options.seconds.unwrap_or(0.0),
        frames_at_a_time: options.frames_at_a_time.unwrap_or(0),
        frames_per_second: options.fps.or(recipe.frames_per_second).unwrap_or(0.0),
        count: options.sampling.count,
        init_image: pictures.init_image,
        end_image: pictures.end,
        fp8_attention: common.sampling.fp8_attention,
        cards: common.sampling.cards,
        omit_metadata,
        output: asked.film.into(),
        options: Some(common.job),
        ..api::sampling_out!(v1::GenerateVideoRequest, common.sampling)
    }))
}

/// The sides of a picture or film, in pixels; 0 where they are not set.
fn sides(options: &Settings, recipe: &Recipe) -> (u32, u32) {
    (
        options.width.unwrap_or(recipe.width),
        options.height.unwrap_or(recipe.height),
    )
}

/// The pictures of a request.
struct Pictures {
    init_image: Option<Bytes>,
    end: Option<v1::PictureInput>,
    mask: Option<v1::PictureInput>,
    references: Vec<v1::PictureInput>,
    controls: Vec<v1::Control>,
}

impl Pictures {
    /// Reads the pictures that the options name. It is an error if the recipe was made with a picture that they do not name.
    fn read(options: &Settings, recipe: &Recipe) -> Result<Pictures, CliError> {
        let init_image = options.init.as_deref().map(read_media).transpose()?;
        if init_image.is_none() && recipe.strength.is_some() {
            return Err(CliError::Usage(
                "that picture was made from another: name it with --init to repeat it".to_owned(),
            ));
        }
        let input = |path: &Path| -> Result<v1::PictureInput, CliError> {
            Ok(v1::PictureInput {
                data: Some(read_media(path)?),
                ..Default::default()
            })
        };
        let end = options.end.as_deref().map(input).transpose()?;
        let mask = options.mask.as_deref().map(input).transpose()?;
        let references = options.reference.iter().map(|path| input(path));
        let references = references.collect::<Result<Vec<_>, _>>()?;
        let controls = options.control.iter().map(|(name, path)| {
            Ok(v1::Control {
                id: name.clone(),
                image: Some(input(path)?),
                scale: options.control_scale,
                start: options.control_steps.map(|(start, _)| start),
                end: options.control_steps.map(|(_, end)| end),
                mode: options.control_mode,
            })
        });
        let controls = controls.collect::<Result<Vec<_>, CliError>>()?;
        let is_given = |name: &str| match name {
            "end" => end.is_some(),
            "mask" => mask.is_some(),
            "reference" => !references.is_empty(),
            "control" => !controls.is_empty(),
            _ => true,
        };
        if let Some(missing) = recipe.pictures.iter().find(|name| !is_given(name)) {
            return Err(CliError::Usage(format!(
                "that picture was made with another: name it with --{missing} to repeat it"
            )));
        }
        Ok(Pictures {
            init_image,
            end,
            mask,
            references,
            controls,
        })
    }
}

/// Fields that requests of all media have.
struct SharedFields {
    model: v1::ModelRef,
    job: v1::JobOptions,
    sampling: Sampling,
}

impl SharedFields {
    fn of(asked: &Wanted<'_>, options: &Settings, recipe: &Recipe) -> Result<SharedFields, CliError> {
        let model = match asked.model {
            None => options.formats.or_those_of(recipe).of(&recipe.model),
            Some(model) => options.formats.or_adapters_of(recipe).of(model),
        }?;
        Ok(SharedFields {
            model,
            job: job_of(&options.job, asked.client),
            sampling: options.sampling.sampling().or(recipe.sampling()),
        })
    }
}

fn job_of(job: &JobSettings, client: &str) -> v1::JobOptions {
    v1::JobOptions {
        client_id: job.client.clone().unwrap_or_else(|| client.to_owned()),
        detach: job.detach,
        priority: match job.priority {
            PriorityChoice::Low => v1::Priority::Low,
            PriorityChoice::Normal => v1::Priority::Normal,
            PriorityChoice::High => v1::Priority::High,
        }
        .into(),
        patience_ms: job.patience.map(|patience| millis(patience.into())),
        allow_low_memory: job.allow_low_memory,
        card: job.card.clone().unwrap_or_default(),
        headroom_bytes: job.headroom.map(|headroom| headroom.0),
        ..Default::default()
    }
}

/// The request of a track. Its source and its reference are uploaded before it is sent, and their ids are added then.
fn track_of(
    asked: &Wanted<'_>,
    prompt: String,
    options: &Settings,
    omit_metadata: bool,
) -> Result<Asked, CliError> {
    let recipe = asked.recipe.clone().unwrap_or_default();
    let track = &options.track;
    let given = [
        ("source", "--init", options.init.is_some()),
        ("reference", "--reference", !options.reference.is_empty()),
    ];
    for (sound, option, is_given) in given {
        if recipe.sounds.iter().any(|each| each == sound) && !is_given {
            return Err(CliError::Usage(format!(
                "that track was made with another: name it with {option} to repeat it"
            )));
        }
    }
    if options.reference.len() > 1 {
        return Err(CliError::Usage(
            "a track takes one --reference: leave the others out".to_owned(),
        ));
    }
    let lyrics = options.lyrics.as_deref().map(text).transpose()?;
    let task = match track.task {
        Some(task) => task_of(task),
        None => v1::AudioTask::from_str_name(&recipe.task.to_uppercase()).unwrap_or_default(),
    };
    let common = SharedFields::of(asked, options, &recipe)?;
    let word = |given: &Option<String>, of_recipe: String| given.clone().unwrap_or(of_recipe);
    Ok(Asked::Audio(v1::GenerateAudioRequest {
        model: Some(common.model),
        prompt,
        lyrics: lyrics.unwrap_or(recipe.lyrics),
        seconds: options.seconds.or(recipe.seconds).unwrap_or(0.0),
        count: options.sampling.count,
        omit_metadata,
        output: asked.track.into(),
        task: task.into(),
        tracks: match track.tracks.is_empty() {
            true => recipe.tracks,
            false => track.tracks.clone(),
        },
        strengths: match options.sampling.strength {
            Some(_) => Vec::new(),
            None => strengths_of(&recipe.strengths),
        },
        window_start_seconds: track.from.or(recipe.window.map(|(start, _)| start)),
        window_end_seconds: track.to.or(recipe.window.and_then(|(_, end)| end)),
        beats_per_minute: track.bpm.or(recipe.bpm),
        key: word(&track.key, recipe.key),
        time_signature: word(&track.time_signature, recipe.time_signature),
        language: word(&track.language, recipe.language),
        options: Some(common.job),
        ..api::sampling_out!(v1::GenerateAudioRequest, common.sampling)
    }))
}

fn strengths_of(points: &[(f32, f32)]) -> Vec<v1::StrengthAt> {
    let points = points.iter();
    points
        .map(|&(seconds, strength)| v1::StrengthAt { seconds, strength })
        .collect()
}

fn task_of(task: TaskChoice) -> v1::AudioTask {
    match task {
        TaskChoice::Repaint => v1::AudioTask::Repaint,
        TaskChoice::Cover => v1::AudioTask::Cover,
        TaskChoice::Extract => v1::AudioTask::Extract,
        TaskChoice::Lego => v1::AudioTask::Lego,
        TaskChoice::Complete => v1::AudioTask::Complete,
    }
}

fn prompt_from_stdin() -> Result<String, CliError> {
    if std::io::stdin().is_terminal() {
        return Err(CliError::Usage(
            "the prompt is missing: write it on the command line, or pipe it in".to_owned(),
        ));
    }
    let prompt = text_from_stdin()?;
    match prompt.trim() {
        "" => Err(CliError::Usage(
            "standard input is empty: pipe a prompt in, or write it on the command line".to_owned(),
        )),
        trimmed => Ok(trimmed.to_owned()),
    }
}

/// The prompts, in their order: from a file; else one from the command line, the recipe or standard input.
pub(super) fn prompts_of(
    written: Option<&str>,
    file: Option<&Path>,
    recipe: Option<&Recipe>,
) -> Result<Vec<String>, CliError> {
    if let Some(file) = file {
        let text = if file == Path::new("-") {
            text_from_stdin()?
        } else {
            text(file)?
        };
        let prompts: Vec<String> = text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
            .map(str::to_owned)
            .collect();
        if prompts.is_empty() {
            return Err(CliError::file(file, "has no prompt: write one on each line"));
        }
        return Ok(prompts);
    }
    let prompt = match (written, recipe) {
        (Some(prompt), _) if prompt != "-" => prompt.to_owned(),
        (None, Some(recipe)) => recipe.prompt.clone(),
        (Some(_), _) | (None, None) => prompt_from_stdin()?,
    };
    if prompt.trim().is_empty() && written.is_some() {
        return Err(CliError::Usage(
            "the prompt is empty: write what to generate".to_owned(),
        ));
    }
    Ok(vec![prompt])
}

fn text_from_stdin() -> Result<String, CliError> {
    gpu::all_text_of(std::io::stdin(), bounded::TEXT_BYTES)
        .map_err(|problem| CliError::file(Path::new("standard input"), problem))
}

fn text(path: &Path) -> Result<String, CliError> {
    gpu::text_bounded(path, bounded::TEXT_BYTES).map_err(|problem| CliError::file(path, problem))
}

pub(super) fn recipe_of(path: &Path) -> Result<Recipe, CliError> {
    media::recipe_of(&read(path)?).map_err(|problem| CliError::file(path, problem))
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, CliError> {
    gpu::read_bounded(path, bounded::MEDIA_BYTES).map_err(|problem| CliError::file(path, problem))
}

/// The file of a picture or track. A file of 0 bytes is refused: a failed download or copy leaves such files.
pub(super) fn read_media(path: &Path) -> Result<Bytes, CliError> {
    let data = read(path)?;
    if data.is_empty() {
        return Err(CliError::file(
            path,
            "is empty: it has 0 bytes; name another file, or copy it again",
        ));
    }
    Ok(data.into())
}
