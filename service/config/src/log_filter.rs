//! The filter of the log.

use tracing_subscriber::EnvFilter;

/// Libraries that log every frame and handshake at `debug`; they log from `info` on, unless a filter names them.
const LIBRARIES: [&str; 8] = [
    "h2",
    "hyper",
    "hyper_util",
    "tonic",
    "tower",
    "reqwest",
    "rustls",
    "mio",
];

/// Checks a user's filter.
///
/// # Errors
/// For people: the problem of the filter.
pub(crate) fn check_filter(filter: &str) -> Result<(), String> {
    match EnvFilter::try_new(directives(filter)) {
        Ok(_) => Ok(()),
        Err(problem) => Err(format!(
            "{filter:?} is no filter such as \"info\" or \"engine=debug,info\": {problem}"
        )),
    }
}

/// The directives of a filter: those of libraries that log too much, overridden by those of `filter`.
pub fn directives(filter: &str) -> String {
    let quiet = LIBRARIES.map(|library| format!("{library}=info"));
    format!("{},{filter}", quiet.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_excludes_libraries_unless_the_filter_names_them() {
        let shown = |filter: &str| EnvFilter::new(directives(filter)).to_string();
        assert!(shown("debug").contains("h2=info"), "{}", shown("debug"));
        assert!(shown("debug,h2=trace").contains("h2=trace"));
        assert!(!shown("debug,h2=trace").contains("h2=info"));
        assert!(!shown("debug").contains("engine::card"));
        assert!(EnvFilter::try_new(directives("info,engine=trace")).is_ok());
    }
}
