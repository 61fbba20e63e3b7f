//! `moored config`.

use serde_json::json;

use super::{CliError, screen};
use crate::config::Config;

/// Every setting with its value and its source.
pub(super) fn configuration(config: &Config, as_json: bool) -> Result<(), CliError> {
    if as_json {
        return screen::json(&json!(config.sources));
    }
    let rows = config
        .sources
        .iter()
        .map(|s| vec![s.name.clone(), s.value.clone(), s.source.clone()]);
    screen::table(&["setting", "value", "from"], rows.collect())
}
