//! Reads settings one by one, so that one mistake does not hide the next.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use figment::error::{Actual, Kind};
use figment::value::{Dict, Value};
use figment::{Figment, Provider as _, Source};
use residency::Bytes;
use serde::de::DeserializeOwned;

use super::layers::below;
use super::{SHORT_NAMES, Setting, UnloadWhenIdle, home_folder};

/// All mistakes in the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistakes(Vec<String>);

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            1 => write!(f, "the configuration has an error:")?,
            several => write!(f, "the configuration has {several} errors:")?,
        }
        for mistake in &self.0 {
            write!(f, "\n  {}", wording::lines(mistake))?;
        }
        f.write_str("\n`moored config --defaults` prints every setting with what it means")
    }
}

impl Mistakes {
    /// A single mistake.
    pub(super) fn one(mistake: String) -> Mistakes {
        Mistakes(vec![mistake])
    }
}

impl std::error::Error for Mistakes {}

/// The layer of the variables.
pub(super) const ENVIRONMENT: &str = "environment";
/// The layer of the defaults.
pub(super) const EMBEDDED: &str = "defaults";

/// Reads settings from the layers, and records mistakes and which settings exist.
pub(super) struct Reader {
    figment: Figment,
    asked_for: Vec<&'static str>,
    /// Tables whose keys are the user's own.
    open_tables: Vec<&'static str>,
    mistakes: Vec<String>,
    /// Settings with a mistake.
    wrong: BTreeSet<String>,
}

impl Reader {
    pub(super) fn new(figment: Figment, mistakes: Vec<String>) -> Reader {
        Reader {
            figment,
            asked_for: Vec::new(),
            open_tables: Vec::new(),
            mistakes,
            wrong: BTreeSet::new(),
        }
    }

    /// Records a mistake in a setting.
    pub(super) fn mistake(&mut self, name: &str, problem: impl fmt::Display) {
        let source = self.source(name);
        self.mistakes.push(format!("{name} ({source}): {problem}"));
        self.wrong.insert(name.to_owned());
    }

    /// Whether a mistake in a setting was recorded.
    pub(super) fn is_wrong(&self, name: &str) -> bool {
        self.wrong.contains(name)
    }

    /// A string that is parsed.
    pub(super) fn parsed<T>(&mut self, name: &'static str, expected: &str) -> T
    where
        T: FromStr + Placeholder,
    {
        let text = self.text(name);
        text.parse().unwrap_or_else(|_| {
            self.mistake(name, format!("{text:?} is not {expected}"));
            T::placeholder()
        })
    }

    /// A list of strings that are parsed. A single string is a list of one, split at spaces, as
    /// variables and flags write it.
    pub(super) fn parsed_list<T>(&mut self, name: &'static str) -> Vec<T>
    where
        T: FromStr,
        T::Err: fmt::Display,
    {
        let mut values = Vec::new();
        for text in self.texts(name) {
            match text.parse() {
                Ok(value) => values.push(value),
                Err(problem) => self.mistake(name, problem),
            }
        }
        values
    }

    /// A folder or file for each string.
    pub(super) fn paths(&mut self, name: &'static str) -> Vec<PathBuf> {
        let texts = self.texts(name);
        texts.iter().map(|text| self.path_of(name, text)).collect()
    }

    /// A path by its text, which is the value of a setting or a part of it.
    pub(super) fn path_of(&mut self, name: &'static str, text: &str) -> PathBuf {
        if text.contains('\0') {
            self.mistake(name, format!("{text:?} has a NUL in it, which no path has"));
        }
        in_home(text)
    }

    /// A list of names, none of them empty.
    pub(super) fn words(&mut self, name: &'static str) -> Vec<String> {
        let words = self.texts(name);
        if words.iter().any(|word| word.trim().is_empty()) {
            self.mistake(name, "has an empty name in it");
        }
        words
    }

    /// An integer of at least `least`.
    pub(super) fn at_least<T>(&mut self, name: &'static str, least: T) -> T
    where
        T: DeserializeOwned + PartialOrd + fmt::Display + Copy,
    {
        match self.value::<T>(name) {
            Some(number) if number >= least => number,
            Some(number) => {
                self.mistake(name, format!("{number} is less than {least}"));
                least
            }
            None => least,
        }
    }

    /// A size of memory such as "512MiB"; a bare number is bytes.
    pub(super) fn size(&mut self, name: &'static str) -> Bytes {
        self.size_to(name, MOST_MEMORY)
    }

    /// A size of files.
    pub(super) fn size_of_files(&mut self, name: &'static str) -> Bytes {
        self.size_to(name, MOST_FILES)
    }

    fn size_to(&mut self, name: &'static str, most: Bytes) -> Bytes {
        let text = self.text(name);
        match text.parse::<bytesize::ByteSize>() {
            Ok(size) if size.as_u64() <= most.0 => Bytes(size.as_u64()),
            Ok(_) => {
                let problem = format!("{text:?} is too large: {most} is the most; write a smaller size");
                self.mistake(name, problem);
                Bytes::ZERO
            }
            Err(_) => {
                self.mistake(name, format!("{text:?} is not a size such as \"512MiB\""));
                Bytes::ZERO
            }
        }
    }

    /// A size of at least `least`, and at most `most`.
    pub(super) fn size_within(&mut self, name: &'static str, least: Bytes, most: Bytes) -> Bytes {
        let told = self.mistakes.len();
        let size = self.size_to(name, most);
        if size < least && self.mistakes.len() == told {
            self.mistake(name, format!("is {size}; {least} is the least that is of use"));
        }
        size
    }

    /// Whether a setting is this word, which stands for no value of the setting's type.
    fn is_word(&mut self, name: &'static str, word: &str) -> bool {
        let is_it = self.peek(name).is_some_and(|text| text == word);
        if is_it {
            self.asked_for.push(name);
        }
        is_it
    }

    /// A size, or "".
    pub(super) fn optional_size(&mut self, name: &'static str) -> Option<Bytes> {
        if self.is_word(name, "") {
            return None;
        }
        Some(self.size(name))
    }

    /// A time such as "30s".
    pub(super) fn duration(&mut self, name: &'static str) -> Duration {
        let text = self.text(name);
        time_of(&text).unwrap_or_else(|problem| {
            self.mistake(name, problem);
            Duration::ZERO
        })
    }

    /// A time of at least `least`.
    pub(super) fn time_from(&mut self, name: &'static str, least: Duration) -> Duration {
        let told = self.mistakes.len();
        let time = self.duration(name);
        if time < least && self.mistakes.len() == told {
            let (time, least) = (
                humantime::format_duration(time),
                humantime::format_duration(least),
            );
            self.mistake(
                name,
                format!("is {time}; {least} is the least that leaves time for anything"),
            );
        }
        time
    }

    /// A time, or "".
    pub(super) fn optional_duration(&mut self, name: &'static str) -> Option<Duration> {
        if self.is_word(name, "") {
            return None;
        }
        Some(self.duration(name))
    }

    /// A time of at least this, or "".
    pub(super) fn optional_time_from(&mut self, name: &'static str, least: Duration) -> Option<Duration> {
        if self.is_word(name, "") {
            return None;
        }
        Some(self.time_from(name, least))
    }

    /// A duration, "" for never, or "auto".
    pub(super) fn unload_when_idle(&mut self, name: &'static str) -> UnloadWhenIdle {
        if self.is_word(name, "auto") {
            return UnloadWhenIdle::OnDesktops;
        }
        self.optional_duration(name)
            .map_or(UnloadWhenIdle::Never, UnloadWhenIdle::After)
    }

    /// A path, or "".
    pub(super) fn optional_path(&mut self, name: &'static str) -> Option<PathBuf> {
        self.optional_text(name).map(|text| self.path_of(name, &text))
    }

    /// A text that `check` verifies.
    pub(super) fn checked_text(
        &mut self,
        name: &'static str,
        check: impl FnOnce(&str) -> Result<(), String>,
    ) -> String {
        let told = self.mistakes.len();
        let text = self.text(name);
        if self.mistakes.len() == told
            && let Err(problem) = check(&text)
        {
            self.mistake(name, problem);
        }
        text
    }

    /// A text, or "".
    pub(super) fn optional_text(&mut self, name: &'static str) -> Option<String> {
        Some(self.text(name)).filter(|text| !text.is_empty())
    }

    /// One of a few words.
    pub(super) fn choice<T: Clone>(&mut self, name: &'static str, choices: &[(&str, T)]) -> T {
        let text = self.text(name);
        if let Some((_, value)) = choices.iter().find(|(word, _)| *word == text) {
            return value.clone();
        }
        let words: Vec<&str> = choices
            .iter()
            .map(|(word, _)| *word)
            .filter(|word| !word.is_empty())
            .collect();
        self.mistake(name, format!("{text:?} is none of {}", words.join(", ")));
        choices[0].1.clone()
    }

    /// A boolean.
    pub(super) fn flag(&mut self, name: &'static str) -> bool {
        self.value(name).unwrap_or_default()
    }

    /// A boolean that a variable may set to 1.
    pub(super) fn switch(&mut self, name: &'static str) -> bool {
        self.asked_for.push(name);
        let text = match self.figment.find_value(name) {
            Ok(Value::Bool(_, value)) => return value,
            Ok(Value::Num(_, number)) => {
                let signed = number.to_i128().map(|n| n.to_string());
                signed
                    .or_else(|| number.to_u128().map(|n| n.to_string()))
                    .unwrap_or_default()
            }
            Ok(value) => value.into_string().unwrap_or_default(),
            Err(_) => String::new(),
        };
        match text.trim().to_ascii_lowercase().as_str() {
            "1" | "yes" | "on" => true,
            "" | "0" | "no" | "off" => false,
            _ => {
                self.mistake(name, format!("{text:?} is neither true nor false"));
                false
            }
        }
    }

    /// A table whose keys are the user's.
    pub(super) fn table<T: DeserializeOwned>(&mut self, name: &'static str) -> BTreeMap<String, T> {
        self.open_tables.push(name);
        self.value(name).unwrap_or_default()
    }

    /// A text as it is. Numbers are taken as text too: a size may be a bare number.
    pub(super) fn text(&mut self, name: &'static str) -> String {
        self.asked_for.push(name);
        match self.figment.find_value(name) {
            Ok(Value::String(_, text)) => text,
            Ok(Value::Num(_, number)) => number
                .to_u128()
                .map(|n| n.to_string())
                .or_else(|| number.to_f64().map(|n| n.to_string()))
                .unwrap_or_default(),
            Ok(_) => {
                self.mistake(name, "is to be written in quotes");
                String::new()
            }
            Err(problem) => {
                self.mistakes.push(problem.to_string());
                String::new()
            }
        }
    }

    /// Ends the reading: the settings with their sources, or all mistakes. `in_force` has the resolved values of settings
    /// that are left open.
    pub(super) fn finish(mut self, in_force: &[(&str, String)]) -> Result<Vec<Setting>, Mistakes> {
        match self.figment.data() {
            Ok(profiles) => {
                for dict in profiles.values() {
                    self.find_unknown("", dict);
                }
            }
            Err(problem) => self.mistakes.extend(problem.into_iter().map(|p| p.to_string())),
        }
        self.mistakes.sort();
        self.mistakes.dedup();
        if !self.mistakes.is_empty() {
            return Err(Mistakes(self.mistakes));
        }
        let names = self.asked_for.iter().chain(&self.open_tables);
        let mut settings: Vec<Setting> = names
            .map(|name| {
                let set = self.figment.find_value(name).map(|value| json_of(&value));
                let value = set.unwrap_or_default();
                let open = value.as_str().is_some_and(str::is_empty);
                let resolved = in_force.iter().find(|(known, _)| known == name).filter(|_| open);
                Setting {
                    name: (*name).to_owned(),
                    value: resolved.map_or(value, |(_, value)| value.clone().into()),
                    source: self.source(name),
                }
            })
            .collect();
        settings.sort_by(|a, b| a.name.cmp(&b.name));
        settings.dedup_by(|a, b| a.name == b.name); // a table is both asked for and open
        Ok(settings)
    }

    fn find_unknown(&mut self, prefix: &str, dict: &Dict) {
        for (key, value) in dict {
            let name = below(prefix, key);
            if self.asked_for.contains(&name.as_str()) || self.open_tables.contains(&name.as_str()) {
                continue;
            }
            let is_table = |known: &&str| {
                known
                    .strip_prefix(name.as_str())
                    .is_some_and(|rest| rest.starts_with('.'))
            };
            let known = || self.asked_for.iter().chain(&self.open_tables);
            match value {
                Value::Dict(_, inner) if !inner.is_empty() || known().any(is_table) => {
                    self.find_unknown(&name, inner);
                }
                Value::Dict(..) => {
                    let tables = known().filter_map(|known| known.split_once('.').map(|(table, _)| table));
                    let problem = not_there("table", meant(&name, tables));
                    self.mistake(&name, problem);
                }
                _ => {
                    let problem = not_there("setting", meant(&name, known().copied()));
                    self.mistake(&name, problem);
                }
            }
        }
    }

    fn texts(&mut self, name: &'static str) -> Vec<String> {
        self.asked_for.push(name);
        match self.figment.find_value(name) {
            Ok(Value::String(_, text)) => text.split_whitespace().map(str::to_owned).collect(),
            Ok(_) => match self.figment.extract_inner::<Vec<String>>(name) {
                Ok(texts) => texts,
                Err(problem) => {
                    self.mistake(name, problem);
                    Vec::new()
                }
            },
            Err(problem) => {
                self.mistakes.push(problem.to_string());
                Vec::new()
            }
        }
    }

    fn value<T: DeserializeOwned>(&mut self, name: &'static str) -> Option<T> {
        self.asked_for.push(name);
        match self.figment.extract_inner(name) {
            Ok(value) => Some(value),
            Err(problem) => {
                for each in problem {
                    self.mistake(name, in_words(&each.kind));
                }
                None
            }
        }
    }

    fn peek(&self, name: &str) -> Option<String> {
        self.figment.find_value(name).ok()?.into_string()
    }

    fn source(&self, name: &str) -> String {
        let Some(metadata) = self.figment.find_metadata(name) else {
            return "default".to_owned();
        };
        match &metadata.source {
            Some(Source::File(path)) => path.display().to_string(),
            Some(Source::Custom(layer)) if layer == ENVIRONMENT => variable(name),
            Some(Source::Custom(layer)) if layer == EMBEDDED => "default".to_owned(),
            _ => "flag".to_owned(),
        }
    }
}

/// More than the memory of any machine.
pub(super) const MOST_MEMORY: Bytes = Bytes(64 << 40);
/// More than the disks of any machine.
const MOST_FILES: Bytes = Bytes(1 << 60);
/// Longer than anything here runs, and short enough to be added to any time.
const LONGEST_TIME: Duration = Duration::from_secs(100 * 366 * 24 * 3600);

/// A time such as "30s".
///
/// # Errors
/// For people: why the text is no time.
fn time_of(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(time) if time <= LONGEST_TIME => Ok(time),
        Ok(_) => Err(format!(
            "{text:?} is longer than a hundred years: write a shorter time"
        )),
        Err(_) => Err(format!("{text:?} is not a time such as \"30s\"")),
    }
}

/// A path as it is written, in which a leading `~` is the user's home: a shell expands it only where it stands alone.
pub(super) fn in_home(text: &str) -> PathBuf {
    from_home(text, home_folder().as_deref())
}

/// A path in which a leading `~` is this folder.
pub(super) fn from_home(text: &str, home: Option<&Path>) -> PathBuf {
    match (text.strip_prefix('~'), home) {
        (Some(""), Some(home)) => home.to_owned(),
        (Some(rest), Some(home)) if rest.starts_with('/') => home.join(rest.trim_start_matches('/')),
        _ => PathBuf::from(text),
    }
}

pub(super) fn not_there(what: &str, meant: Option<&str>) -> String {
    match meant {
        Some(meant) => format!("there is no such {what}; {meant} is one"),
        None => format!("there is no such {what}"),
    }
}

/// The name that was probably meant.
pub(super) fn meant<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    const ALIKE: f64 = 0.8;
    let alike = known.map(|known| (strsim::jaro_winkler(name, known), known));
    let best = alike.max_by(|(a, _), (b, _)| a.total_cmp(b))?;
    (best.0 >= ALIKE).then_some(best.1)
}

/// The environment variable of a setting.
pub(super) fn variable(name: &str) -> String {
    let short = SHORT_NAMES.iter().find(|(_, long)| *long == name);
    let short = short.map_or_else(|| name.replace('.', "_"), |(short, _)| (*short).to_owned());
    format!("MOORED_{}", short.to_uppercase())
}

fn json_of(value: &Value) -> serde_json::Value {
    serde_json::to_value(value).unwrap_or_default()
}

/// The message of a wrong value, without the names of Rust types.
fn in_words(kind: &Kind) -> String {
    match kind {
        Kind::InvalidType(found, expected) => {
            // Serde has no other name for a type than this.
            let expected = expected.to_string();
            let expected = match expected.as_str() {
                "u8" | "u16" | "u32" | "u64" | "usize" | "i8" | "i16" | "i32" | "i64" | "isize" => {
                    "a whole number"
                }
                "f32" | "f64" => "a number",
                "a boolean" | "bool" => "true or false",
                other => other,
            };
            let found = match found {
                Actual::Str(text) => format!("{text:?}"),
                other => other.to_string(),
            };
            format!("{found} is not {expected}")
        }
        // Of a kind of number that has no such value.
        Kind::InvalidValue(found, _) => match found {
            Actual::Signed(number) if *number < 0 => format!("{number} is less than 0"),
            Actual::Signed(number) => format!("{number} is too large"),
            Actual::Unsigned(number) => format!("{number} is too large"),
            found => format!("{found} is too large"),
        },
        other => other.to_string(),
    }
}

/// The value of a setting that could not be read, until all mistakes are reported. It is never used.
pub(super) trait Placeholder {
    fn placeholder() -> Self;
}

impl Placeholder for std::net::SocketAddr {
    fn placeholder() -> Self {
        (std::net::Ipv4Addr::LOCALHOST, 0).into()
    }
}

/// A time, or "" for none, in a table that serde reads.
pub(super) fn keep_alive<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Option<Duration>>, D::Error> {
    let text = <String as serde::Deserialize>::deserialize(deserializer)?;
    if text.is_empty() {
        return Ok(Some(None));
    }
    let time = time_of(&text).map(|time| Some(Some(time)));
    time.map_err(|problem| {
        serde::de::Error::custom(format!(
            "keep_alive: {problem}; write a time such as 10m, or \"\""
        ))
    })
}
