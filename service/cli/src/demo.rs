//! `moored demo`: everything in one command. It starts a service with the shipped models, asks it for pictures, a film and a
//! sound as any client would, and ends it.

use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::time::Instant;

use api::v1;
use config::Config;
use hub::catalogue::{SHIPPED_FILM_ID, SHIPPED_ID, SHIPPED_SOUND_ID};
use image::{ImageFormat, Rgb, RgbImage, imageops};
use residency::Bytes;
use serde_json::json;

use crate::Program;
use crate::arguments::{Demo, Verbosity};
use crate::available::Card;
use crate::connection::Connection;
use crate::destination::{check_files, write};
use crate::generate::{Generated, generate, summary};
use crate::local::LocalService;
use crate::picture::{Canvas, picture};
use crate::request::Asked;
use crate::show::Show;
use crate::{CliError, screen};

/// One prompt a line, in the language of the shipped model.
const PROMPTS: &str = include_str!("demo_prompts.txt");
/// The film that begins with the first picture.
const FILM_PROMPT: &str = "the red circle moves to the top left on a yellow background";
/// Side of the films that the model was trained on, in pixels. Without it, the film would have the size of its start picture.
const FILM_SIDE: u32 = 64;
/// In the language of the sound model.
const SOUND_PROMPT: &str = "three high short notes, then a low long one, square wave";
/// Space around the pictures of the contact sheet.
const MARGIN_PIXELS: u32 = 8;
const SHEET_COLUMNS: u32 = 4;

/// Starts a service, generates a picture for each prompt, a film of the first and a sound, and ends the service.
pub(super) async fn run(
    program: &dyn Program,
    mut config: Config,
    options: Demo,
    as_json: bool,
) -> Result<(), CliError> {
    check_free(&options)?;
    config.service.listen = (std::net::Ipv4Addr::LOCALHOST, 0).into();
    config.service.token_file = None;
    config.client.token_file = None;
    let state = std::env::temp_dir().join(format!("moored-demo-{}", std::process::id()));
    config.service.state = state.clone();
    let headroom = config.cards.headroom;
    let outcome = match LocalService::start(program, config).await {
        Ok((service, connection)) => {
            let generated = generate_all(connection, headroom, &options, as_json).await;
            service.end_with(generated).await
        }
        Err(problem) => Err(problem),
    };
    let _ = std::fs::remove_dir_all(state);
    outcome
}

fn contact_sheet(options: &Demo) -> PathBuf {
    options.out.join("contact-sheet.png")
}

fn picture_path(options: &Demo, index: usize) -> PathBuf {
    options.out.join(format!("{:02}.png", index + 1))
}

fn film_path(options: &Demo) -> PathBuf {
    options.out.join("film.mp4")
}

fn sound_path(options: &Demo) -> PathBuf {
    options.out.join("sound.wav")
}

fn prompts() -> impl Iterator<Item = (usize, &'static str)> {
    PROMPTS.lines().filter(|line| !line.is_empty()).enumerate()
}

/// Refuses, before anything is generated, what could not be written, such as files of an earlier run.
fn check_free(options: &Demo) -> Result<(), CliError> {
    let pictures = prompts().map(|(index, _)| picture_path(options, index));
    let others = [contact_sheet(options), film_path(options), sound_path(options)];
    check_files(pictures.chain(others), options.force)
}

async fn generate_all(
    connection: Connection,
    headroom: Bytes,
    options: &Demo,
    as_json: bool,
) -> Result<(), CliError> {
    let mut sheet = Vec::new();
    let mut start = Vec::new();
    let started = Instant::now();
    for (index, prompt) in prompts() {
        let request = Asked::Generate(v1::GenerateImageRequest {
            model: Some(shipped(SHIPPED_ID)),
            prompt: prompt.to_owned(),
            seed: Some(options.seed.wrapping_add(index as u64)),
            options: Some(of_demo()),
            ..Default::default()
        });
        let generated = generate(&connection, request, &mut show(as_json)).await?;
        let file = write_result(
            &picture_path(options, index),
            prompt,
            &generated,
            options,
            as_json,
        )?;
        let picture = image::load_from_memory(&file).map_err(|e| CliError::Failed(e.to_string()))?;
        sheet.push(picture.into_rgb8());
        if start.is_empty() {
            start = file;
        }
    }
    let request = Asked::Video(v1::GenerateVideoRequest {
        model: Some(shipped(SHIPPED_FILM_ID)),
        prompt: FILM_PROMPT.to_owned(),
        width: FILM_SIDE,
        height: FILM_SIDE,
        seed: Some(options.seed),
        init_image: Some(start.into()),
        output: v1::FilmFormat::Mp4.into(),
        options: Some(of_demo()),
        ..Default::default()
    });
    let film = generate(&connection, request, &mut show(as_json)).await?;
    write_result(&film_path(options), FILM_PROMPT, &film, options, as_json)?;
    let request = Asked::Audio(v1::GenerateAudioRequest {
        model: Some(shipped(SHIPPED_SOUND_ID)),
        prompt: SOUND_PROMPT.to_owned(),
        seed: Some(options.seed),
        options: Some(of_demo()),
        ..Default::default()
    });
    let sound = generate(&connection, request, &mut show(as_json)).await?;
    write_result(&sound_path(options), SOUND_PROMPT, &sound, options, as_json)?;
    let path = contact_sheet(options);
    write_sheet(&sheet, &path, options.force)?;
    let seconds = started.elapsed().as_secs_f64();
    if as_json {
        return screen::json(
            &json!({"event": "contact_sheet", "path": path.display().to_string(),
            "pictures": sheet.len(), "seconds": seconds}),
        );
    }
    let status = connection.residency().get_status(v1::GetStatusRequest {}).await?;
    let status = status.into_inner();
    if screen::verbosity() > Verbosity::Normal {
        screen::drawing(&format!("\n{}\n", picture(&status, Canvas::of_stdout())))?;
    }
    let cards: Vec<&str> = status.cards.iter().map(|card| card.name.as_str()).collect();
    screen::text(&format!(
        "{} pictures, a film and a sound in {seconds:.1} s on {}; look at {}",
        sheet.len(),
        cards.join(", "),
        path.display()
    ))?;
    let card = Card::of_service(&connection, headroom).await?;
    let command = card
        .and_then(|card| card.first_command())
        .map(|command| format!(", and for a real one {command}"));
    screen::note(&format!(
        "next: `moored models --available`{}",
        command.unwrap_or_default()
    ));
    Ok(())
}

fn shipped(id: &str) -> v1::ModelRef {
    v1::ModelRef {
        id: id.to_owned(),
        ..Default::default()
    }
}

fn of_demo() -> v1::JobOptions {
    v1::JobOptions {
        client_id: "demo".to_owned(),
        ..Default::default()
    }
}

fn show(as_json: bool) -> Show {
    match as_json {
        true => Show::new(true),
        false => Show::terminal_only(),
    }
}

/// Writes a result to a file, and prints a line with its path, its time and its subject. Returns the file.
fn write_result(
    path: &Path,
    prompt: &str,
    generated: &Generated,
    options: &Demo,
    as_json: bool,
) -> Result<Vec<u8>, CliError> {
    let (_, _, result) = generated
        .results
        .iter()
        .next()
        .ok_or_else(|| CliError::Failed("the service sent no result".to_owned()))?;
    let file = result.file().map_err(CliError::Failed)?;
    write(path, &file, options.force)?;
    if as_json {
        screen::json(&json!({"event": "written", "prompt": prompt, "path": path.display().to_string()}))?;
    } else {
        let seconds = generated.done.total_ms as f64 / 1000.0;
        screen::text(&format!("{}  {seconds:.1} s  {prompt}", path.display()))?;
        screen::detail(&summary(&generated.done));
    }
    Ok(file)
}

fn write_sheet(pictures: &[RgbImage], path: &Path, force: bool) -> Result<(), CliError> {
    let Some(first) = pictures.first() else {
        return Ok(());
    };
    let (width, height) = (first.width() + MARGIN_PIXELS, first.height() + MARGIN_PIXELS);
    let count = u32::try_from(pictures.len()).unwrap_or(u32::MAX);
    let columns = SHEET_COLUMNS.min(count);
    let rows = count.div_ceil(columns);
    let mut sheet = RgbImage::from_pixel(
        columns * width + MARGIN_PIXELS,
        rows * height + MARGIN_PIXELS,
        Rgb([255, 255, 255]),
    );
    for (index, picture) in (0_u32..).zip(pictures) {
        let (x, y) = (
            index % columns * width + MARGIN_PIXELS,
            index / columns * height + MARGIN_PIXELS,
        );
        imageops::replace(&mut sheet, picture, x.into(), y.into());
    }
    let mut file = Cursor::new(Vec::new());
    let encoded = sheet.write_to(&mut file, ImageFormat::Png);
    encoded.map_err(|problem| CliError::Failed(problem.to_string()))?;
    write(path, file.get_ref(), force)
}
