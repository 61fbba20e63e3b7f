//! `moored status`: the cards as they are, as a picture.

use std::io::IsTerminal as _;

use api::v1;
use config::ClientSettings;
use futures::StreamExt as _;

use crate::arguments::Status;
use crate::connection::Connection;
use crate::picture::{Canvas, picture};
use crate::{CliError, screen};

/// Shows the cards and the jobs; with `--watch` again and again.
pub(super) async fn run(client: &ClientSettings, options: Status, json: bool) -> Result<(), CliError> {
    let mut residency = Connection::open(client).await?.residency();
    if !options.watch {
        let status = residency.get_status(v1::GetStatusRequest {}).await?.into_inner();
        return show(&status, json);
    }
    let mut changes = residency
        .watch_status(v1::WatchStatusRequest { interval_ms: 250 })
        .await?
        .into_inner();
    while let Some(status) = changes.next().await {
        let status = status?;
        if !json && std::io::stdout().is_terminal() {
            screen::redraw(&picture(&status, Canvas::of_stdout()))?;
        } else {
            show(&status, json)?;
        }
    }
    Ok(())
}

fn show(status: &v1::Status, json: bool) -> Result<(), CliError> {
    if json {
        screen::message(status)
    } else {
        screen::drawing(&picture(status, Canvas::of_stdout()))
    }
}
