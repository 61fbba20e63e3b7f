//! Output: the only module that prints. Names and texts from outside are escaped here, whichever module passes them on.

use std::io::{IsTerminal as _, Write as _};
use std::sync::OnceLock;

use comfy_table::{ContentArrangement, Table, presets};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::arguments::Verbosity;
use crate::pull_messages;
use crate::{CliError, interrupt};

/// Prints a line on standard output. A line break in it is escaped, as it can only be part of a foreign name.
pub(super) fn text(text: &str) -> Result<(), CliError> {
    Ok(writeln!(std::io::stdout(), "{}", wording::one_line(text))?)
}

/// Prints several lines of our own on standard output.
pub(super) fn lines(text: &str) -> Result<(), CliError> {
    Ok(writeln!(std::io::stdout(), "{}", wording::lines(text))?)
}

/// Prints a drawing, in its colours.
pub(super) fn drawing(drawing: &str) -> Result<(), CliError> {
    Ok(writeln!(std::io::stdout(), "{}", wording::drawing(drawing))?)
}

/// Draws lines from the top of the terminal, and overwrites its contents.
pub(super) fn redraw(text: &str) -> Result<(), CliError> {
    let drawn = wording::drawing(text).replace('\n', &format!("{END_OF_LINE}\n"));
    Ok(writeln!(
        std::io::stdout(),
        "{TOP}{drawn}{END_OF_LINE}{END_OF_SCREEN}"
    )?)
}

const TOP: &str = "\x1b[H";
const END_OF_LINE: &str = "\x1b[K";
const END_OF_SCREEN: &str = "\x1b[J";

/// Writes bytes to standard output.
pub(super) fn bytes(bytes: &[u8]) -> Result<(), CliError> {
    Ok(std::io::stdout().write_all(bytes)?)
}

/// How much is printed; set once, when the program starts.
static VERBOSITY: OnceLock<Verbosity> = OnceLock::new();

/// Sets how much is printed.
pub(super) fn set_verbosity(verbosity: Verbosity) {
    let _ = VERBOSITY.set(verbosity); // only the first call has an effect
}

/// How much is printed.
pub(super) fn verbosity() -> Verbosity {
    *VERBOSITY.get().unwrap_or(&Verbosity::Normal)
}

/// Prints a message of the API as JSON, with the names of its fields.
pub(super) fn message(message: &impl serde::Serialize) -> Result<(), CliError> {
    let value = serde_json::to_value(message).map_err(|problem| CliError::Failed(problem.to_string()))?;
    json(&value)
}

/// Prints one JSON object on a line of its own.
pub(super) fn json(value: &Value) -> Result<(), CliError> {
    Ok(writeln!(std::io::stdout(), "{}", wording::json(value))?)
}

/// Prints a line on standard error. If it is closed or its disk is full, the command goes on, as its results matter more than its notes.
fn to_stderr(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Prints a line on standard error, unless `--quiet` is set.
pub(super) fn note(text: &str) {
    if verbosity() > Verbosity::Quiet {
        to_stderr(wording::one_line(text));
    }
}

/// Prints a line on standard error, if `--verbose` is set.
pub(super) fn detail(text: &str) {
    if verbosity() > Verbosity::Normal {
        to_stderr(wording::one_line(text));
    }
}

/// Whether a person can be asked: not if JSON is printed, nor in a pipe.
pub(super) fn can_ask(json: bool) -> bool {
    !json && std::io::stdin().is_terminal() && std::io::stderr().is_terminal()
}

/// Asks a question on standard error; true for a yes. A signal ends the wait with an error.
pub(super) async fn confirm(question: &str) -> Result<bool, CliError> {
    write!(std::io::stderr(), "{} [y/N] ", wording::one_line(question))?;
    std::io::stderr().flush()?;
    let answer = interrupt::or(answer()).await?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}

/// Reads the answer to a question. Nothing waits for it once its future is dropped.
async fn answer() -> Result<String, CliError> {
    let (sender, answer) = oneshot::channel();
    // A thread of its own: it ends with the process, however long the line takes.
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = std::io::stdin().read_line(&mut line);
        let _ = sender.send(read.map(|_| line)); // the caller may have left
    });
    Ok(answer.await.map_err(std::io::Error::other)??)
}

/// Prints rows under a heading; in a pipe, with tabs between the columns.
pub(super) fn table(heading: &[&str], rows: Vec<Vec<String>>) -> Result<(), CliError> {
    let cells = |row: Vec<String>| {
        row.iter()
            .map(|cell| wording::one_line(cell).into_owned())
            .collect()
    };
    let rows: Vec<Vec<String>> = rows.into_iter().map(cells).collect();
    if !std::io::stdout().is_terminal() {
        lines(&heading.join("\t"))?;
        return rows.iter().try_for_each(|row| lines(&row.join("\t")));
    }
    let mut table = Table::new();
    table
        .load_style(presets::UTF8_HORIZONTAL_ONLY)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(heading.iter().copied());
    for row in rows {
        table.add_row(row);
    }
    lines(&table.to_string())
}

/// Prints the error that the program ends with.
pub(super) fn fail(error: &CliError, as_json: bool) {
    if as_json {
        let reason = match error {
            CliError::Refused(refusal) => refusal.reason.clone(),
            CliError::Unreachable { .. } => "UNREACHABLE".to_owned(),
            CliError::Config(_) => "CONFIGURATION".to_owned(),
            CliError::Serve(_) => "SERVE".to_owned(),
            CliError::Pull(error) => pull_messages::reason_of(error).as_str_name().to_owned(),
            CliError::File { .. } | CliError::Output(_) => "FILE".to_owned(),
            CliError::Exists(_) => "FILE_EXISTS".to_owned(),
            CliError::NoModel(_) => "MODEL_NOT_FOUND".to_owned(),
            CliError::Usage(_) => "USAGE".to_owned(),
            CliError::Failed(_) => "FAILED".to_owned(),
            CliError::Wire(error) => error.reason().to_owned(),
            CliError::Lost { .. } => "CONNECTION_LOST".to_owned(),
            CliError::InsecureToken { .. } => "INSECURE_TOKEN".to_owned(),
            CliError::DoesNotFit(_) => "NEVER_FITS".to_owned(),
            CliError::NotNow(_) => "MEMORY_TAKEN".to_owned(),
            CliError::Interrupted(_) => "CANCELLED".to_owned(),
        };
        let failed = json!({"event": "failed", "reason": reason, "message": error.to_string()});
        // If nobody reads this, the exit status still reports the failure.
        let _ = writeln!(std::io::stdout(), "{}", wording::json(&failed));
    } else {
        to_stderr(format_args!("moored: {}", wording::lines(&error.to_string())));
    }
}
