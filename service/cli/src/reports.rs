//! `moored config`.

use config::{Config, FileRead};
use serde_json::json;

use crate::{CliError, screen};

/// Every setting with its value and its source; or, with `path`, the file alone.
pub(super) fn configuration(config: &Config, path: bool, as_json: bool) -> Result<(), CliError> {
    if path {
        return match &config.file {
            FileRead::Read(file) | FileRead::NoneAt(Some(file)) => screen::text(&file.display().to_string()),
            FileRead::NoneAt(None) => Err(CliError::Failed(
                "there is no folder for configuration files: HOME is not set".to_owned(),
            )),
        };
    }
    if as_json {
        return config
            .sources
            .iter()
            .try_for_each(|setting| screen::json(&json!(setting)));
    }
    let rows = config
        .sources
        .iter()
        .map(|s| vec![s.name.clone(), s.value.to_string(), s.source.clone()]);
    screen::table(&["setting", "value", "from"], rows.collect())?;
    match &config.file {
        FileRead::Read(file) => screen::note(&format!("read: {}", file.display())),
        FileRead::NoneAt(Some(file)) => {
            screen::note(&format!(
                "no configuration file is there; {} would be read",
                file.display()
            ));
        }
        FileRead::NoneAt(None) => {}
    }
    Ok(())
}
