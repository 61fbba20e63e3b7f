//! Suggestions for words that are no command or option of this program.

use clap::Error;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Commands and options of other programs, and their equivalents here.
const MEANT: [(&str, &str); 18] = [
    ("image", "moored generate \"a cat\""),
    ("imagine", "moored generate \"a cat\""),
    ("picture", "moored generate \"a cat\""),
    ("draw", "moored generate \"a cat\""),
    ("video", "moored film \"a wave\""),
    ("music", "moored play \"a slow waltz\""),
    ("download", "moored pull OWNER/NAME"),
    ("remove", "moored rm OWNER/NAME"),
    ("start", "moored serve"),
    ("top", "moored status --watch"),
    (
        "stop",
        "Ctrl-C ends a service; `moored unload MODEL` frees a model's memory, `moored cancel JOB` ends a job",
    ),
    (
        "logs",
        "a service writes its log to standard error, where it was started (a unit: journalctl)",
    ),
    (
        "drain",
        "Ctrl-C or SIGTERM: the service refuses new jobs, and ends when the others have, or after `service.drain`",
    ),
    ("rn", "moored run MODEL PROMPT"),
    ("run", "moored run MODEL PROMPT"),
    ("generate", "moored generate PROMPT"),
    ("--size", "-W 512 -H 512"),
    ("--resolution", "-W 512 -H 512"),
];

/// Least similarity of a mistyped word to a suggested one.
const ALIKE: f64 = 0.75;

/// A mistake of the command line, with a suggestion where clap has none.
pub(super) fn with_hint(mut mistake: Error) -> Error {
    let (kind, known) = match mistake.kind() {
        ErrorKind::InvalidSubcommand => (ContextKind::InvalidSubcommand, ContextKind::SuggestedSubcommand),
        ErrorKind::UnknownArgument => (ContextKind::InvalidArg, ContextKind::SuggestedArg),
        _ => return mistake,
    };
    let Some(ContextValue::String(written)) = mistake.get(kind) else {
        return mistake;
    };
    let hint = hint(written);
    if mistake.get(known).is_none()
        && let Some(hint) = hint
    {
        let hint = format!("perhaps: {hint}").into();
        mistake.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint]));
    }
    mistake
}

fn hint(written: &str) -> Option<&'static str> {
    let word = written.split_once('=').map_or(written, |(option, _)| option);
    let likeness = |meant: &str| match meant.starts_with("--") == word.starts_with("--") {
        true => strsim::jaro_winkler(meant, word),
        false => 0.0,
    };
    let likely = MEANT.iter().map(|(meant, write)| (likeness(meant), *write));
    let (likeness, write) = likely.max_by(|(a, _), (b, _)| a.total_cmp(b))?;
    (likeness >= ALIKE).then_some(write)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::arguments::Arguments;

    #[test]
    fn words_of_other_programs_get_a_hint() {
        for (written, says) in [
            (vec!["imge", "a cat"], "moored generate"),
            (vec!["rn", "flux"], "moored run"),
            (vec!["top"], "status --watch"),
            (vec!["stop"], "Ctrl-C"),
            (vec!["logs"], "standard error"),
            (vec!["drain"], "service.drain"),
            (vec!["generate", "a cat", "--size", "512x512"], "-W 512 -H 512"),
        ] {
            let line = std::iter::once("moored").chain(written);
            let mistake = Arguments::command().try_get_matches_from(line).unwrap_err();
            let told = with_hint(mistake).to_string();
            assert!(told.contains(says), "{told}");
        }
    }
}
