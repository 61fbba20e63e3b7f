//! Shell completions and manual pages.

use std::path::Path;

use clap_complete::Shell;

use crate::arguments::whole_command;
use crate::{CliError, screen};

/// Prints completions for a shell.
pub(super) fn completions(shell: Shell) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut whole_command(), "moored", &mut script);
    screen::bytes(&script)
}

/// Writes the manual pages into a folder, or the first to standard output.
pub(super) fn manual(folder: Option<&Path>) -> Result<(), CliError> {
    let Some(folder) = folder else {
        let mut page = Vec::new();
        clap_mangen::Man::new(whole_command()).render(&mut page)?;
        return screen::bytes(&page);
    };
    let failed = |problem: std::io::Error| CliError::file(folder, problem);
    std::fs::create_dir_all(folder).map_err(failed)?;
    clap_mangen::generate_to(whole_command(), folder).map_err(failed)
}
