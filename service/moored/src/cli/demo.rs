//! `moored demo`: the whole house in one command. It starts a service with the shipped model, asks it for
//! pictures as any client would, and ends it.

use std::time::{Duration, Instant};

use image::{Rgb, RgbImage, imageops};
use serde_json::json;
use tokio::sync::oneshot;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::arguments::Demo;
use super::connection::Connection;
use super::generate::{Generated, generate, summary, write};
use super::picture::{Canvas, picture};
use super::show::Show;
use super::{CliError, screen};
use crate::config::{Client, Config};
use crate::models::SHIPPED_ID;
use crate::proto::v1;
use crate::proto::v1::plan_request::Request as Asked;
use crate::serve;

/// What is painted: one prompt a line, in the language of the shipped model.
const PROMPTS: &str = include_str!("demo_prompts.txt");
/// Space around the pictures of the contact sheet.
const MARGIN_PIXELS: u32 = 8;
const SHEET_COLUMNS: u32 = 4;
/// A worker that is not ready by then never will be.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Runs the demo.
pub(super) async fn run(mut config: Config, options: Demo, as_json: bool) -> Result<(), CliError> {
    config.service.listen = (std::net::Ipv4Addr::LOCALHOST, 0).into();
    config.service.token_file = None;
    let state = std::env::temp_dir().join(format!("moored-demo-{}", std::process::id()));
    config.service.state = state.clone();
    let (ready, address) = oneshot::channel();
    let (stop, stopped) = oneshot::channel();
    let service = tokio::spawn(serve::run(config, Some(ready), Some(stopped)));
    let outcome = match address.await {
        Ok(address) => {
            let client = Client {
                endpoint: format!("http://{address}"),
                token_file: None,
            };
            paint_all(&client, &options, as_json).await
        }
        Err(_) => Ok(()), // the service ended before it listened: its own error tells
    };
    drop(stop);
    let served = service
        .await
        .map_err(|panic| CliError::Usage(panic.to_string()))?;
    let _ = std::fs::remove_dir_all(state);
    served?;
    outcome
}

async fn paint_all(client: &Client, options: &Demo, as_json: bool) -> Result<(), CliError> {
    let connection = Connection::open(client).await?;
    wait_until_ready(client).await?;
    let mut sheet = Vec::new();
    let started = Instant::now();
    for (index, prompt) in PROMPTS.lines().filter(|line| !line.is_empty()).enumerate() {
        if !as_json {
            screen::text(&format!("\n{}. {prompt}", index + 1))?;
        }
        let request = v1::GenerateImageRequest {
            model: Some(v1::ModelRef {
                id: SHIPPED_ID.to_owned(),
                ..Default::default()
            }),
            prompt: prompt.to_owned(),
            seed: Some(options.seed + index as u64),
            options: Some(v1::JobOptions {
                client_id: "demo".to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let mut show = Show::new(as_json);
        let generated = generate(&connection, Asked::Generate(request), &mut show).await?;
        let resident = resident_names(&connection).await?;
        report(index, prompt, &generated, &resident, options, as_json)?;
        for (_, _, picture) in generated.results.iter() {
            let file = picture.file().map_err(CliError::Usage)?;
            sheet.push(
                image::load_from_memory(&file)
                    .map_err(|e| CliError::Usage(e.to_string()))?
                    .into_rgb8(),
            );
        }
    }
    let path = options.out.join("contact-sheet.png");
    write_sheet(&sheet, &path)?;
    let seconds = started.elapsed().as_secs_f64();
    if as_json {
        return screen::json(
            &json!({"event": "contact_sheet", "path": path.display().to_string(),
            "pictures": sheet.len(), "seconds": seconds}),
        );
    }
    let status = connection
        .residency()
        .get_status(v1::GetStatusRequest {})
        .await?
        .into_inner();
    screen::text(&format!("\n{}\n", picture(&status, Canvas::of_stdout())))?;
    screen::text(&format!(
        "{} pictures in {seconds:.1} s; look at {}",
        sheet.len(),
        path.display()
    ))
}

/// The service answers before its worker does; grpc.health.v1 says when.
async fn wait_until_ready(client: &Client) -> Result<(), CliError> {
    let unreachable = |problem: String| CliError::Unreachable {
        endpoint: client.endpoint.clone(),
        problem,
    };
    let channel = Endpoint::from_shared(client.endpoint.clone()).map_err(|e| unreachable(e.to_string()))?;
    let mut health = HealthClient::new(channel.connect().await.map_err(|e| unreachable(e.to_string()))?);
    let watch = async {
        let mut states = health.watch(HealthCheckRequest::default()).await?.into_inner();
        while let Some(state) = states.message().await? {
            if state.status() == ServingStatus::Serving {
                return Ok(());
            }
        }
        Err(tonic::Status::unavailable("the service ended"))
    };
    match tokio::time::timeout(START_LIMIT, watch).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(unreachable("its worker did not become ready".to_owned())),
    }
}

async fn resident_names(connection: &Connection) -> Result<Vec<String>, CliError> {
    let status = connection
        .residency()
        .get_status(v1::GetStatusRequest {})
        .await?
        .into_inner();
    let components = status
        .cards
        .into_iter()
        .flat_map(|card| card.residents)
        .filter_map(|r| r.component);
    Ok(components
        .map(|c| format!("{} {}", c.name, residency::Bytes(c.bytes)))
        .collect())
}

fn report(
    index: usize,
    prompt: &str,
    generated: &Generated,
    resident: &[String],
    options: &Demo,
    as_json: bool,
) -> Result<(), CliError> {
    for (_, _, picture) in generated.results.iter() {
        let file = picture.file().map_err(CliError::Usage)?;
        let path = options.out.join(format!("{:02}.png", index + 1));
        write(&path, &file)?;
        if as_json {
            screen::json(&json!({"event": "written", "prompt": prompt, "path": path.display().to_string()}))?;
        } else {
            screen::text(&format!("   {}: {}", path.display(), summary(&generated.done)))?;
            screen::text(&format!("   resident: {}", resident.join(", ")))?;
        }
    }
    Ok(())
}

fn write_sheet(pictures: &[RgbImage], path: &std::path::Path) -> Result<(), CliError> {
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
    sheet.save(path).map_err(|e| CliError::File {
        path: path.display().to_string(),
        problem: e.to_string(),
    })
}
