//! The one place that prints.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::io::{IsTerminal as _, Write as _};

use comfy_table::{Table, presets};
use serde_json::{Value, json};

use super::CliError;

/// A line, or several, on standard output.
pub(super) fn text(text: &str) -> Result<(), CliError> {
    Ok(writeln!(std::io::stdout(), "{text}")?)
}

/// One JSON object on a line of its own.
pub(super) fn json(value: &Value) -> Result<(), CliError> {
    text(&value.to_string())
}

/// A line for the person who waits, on standard error.
pub(super) fn note(text: &str) {
    eprintln!("{text}");
}

/// A question, on standard error; the answer is typed behind it.
pub(super) fn ask(question: &str) -> Result<(), CliError> {
    eprint!("{question}");
    Ok(std::io::stderr().flush()?)
}

/// Rows under a heading; in a pipe, tabs between the columns.
pub(super) fn table(heading: &[&str], rows: Vec<Vec<String>>) -> Result<(), CliError> {
    if !std::io::stdout().is_terminal() {
        text(&heading.join("\t"))?;
        for row in rows {
            text(&row.join("\t"))?;
        }
        return Ok(());
    }
    let mut table = Table::new();
    table
        .load_style(presets::UTF8_HORIZONTAL_ONLY)
        .set_header(heading.iter().copied());
    for row in rows {
        table.add_row(row);
    }
    text(&table.to_string())
}

/// A failure, and the end of the program.
pub(super) fn fail(error: &CliError, as_json: bool) {
    if as_json {
        let reason = match error {
            CliError::Refused(refusal) => refusal.reason.clone(),
            CliError::Unreachable { .. } => "UNREACHABLE".to_owned(),
            CliError::Config(_) => "CONFIGURATION".to_owned(),
            CliError::Serve(_) => "SERVE".to_owned(),
            CliError::Pull(error) => error.reason().as_str_name().to_owned(),
            CliError::File { .. } | CliError::Output(_) => "FILE".to_owned(),
            CliError::Usage(_) => "USAGE".to_owned(),
        };
        println!(
            "{}",
            json!({"event": "failed", "reason": reason, "message": error.to_string()})
        );
    } else {
        eprintln!("moored: {error}");
    }
}
