//! Adapters on the command line: `--lora NAME[:STRENGTH[:TEXT_STRENGTH]]`. A name may have colons too, so the list of adapters decides.

use api::v1;
use media::RecipeAdapter;
use model::adapter_stem;

use crate::CliError;
use crate::connection::Connection;

/// Escaped form of a colon that is part of a name.
const ESCAPED_COLON: &str = "\\:";

/// An adapter as it was typed.
#[derive(Clone, Debug)]
pub(super) struct TypedAdapter {
    text: String,
    /// Its possible meanings, the longest name first.
    readings: Vec<v1::Adapter>,
    /// Why the text after its last colon is no strength.
    problem: Option<String>,
}

impl TypedAdapter {
    /// Parses a name and its strengths. Several strengths, separated by commas, are a curve over the steps, at equal distances.
    ///
    /// # Errors
    /// When it has no name.
    pub(super) fn parse(text: &str) -> Result<TypedAdapter, String> {
        let parts = parts_of(text);
        let (mut readings, mut problem) = (Vec::new(), None);
        for strengths in 0..parts.len().min(3) {
            let (name, numbers) = parts.split_at(parts.len() - strengths);
            if name.join(":").is_empty() {
                continue;
            }
            match reading_of(&name.join(":"), numbers) {
                Ok(reading) => readings.push(reading),
                Err(wrong) => problem = problem.or(Some(wrong)),
            }
        }
        if readings.is_empty() || parts[0].is_empty() {
            return Err("write NAME, NAME:STRENGTH or NAME:STRENGTH:TEXT_STRENGTH".to_owned());
        }
        Ok(TypedAdapter {
            text: text.to_owned(),
            readings,
            problem,
        })
    }

    /// Whether the text is ambiguous, so that only the list of installed adapters decides between its readings.
    fn is_open(&self) -> bool {
        self.readings.len() > 1 || self.problem.is_some()
    }

    /// Its meaning where these adapters are listed: the longest name that is listed, else the shortest.
    ///
    /// # Errors
    /// When no name is listed and no strength can be read.
    fn settled(&self, listed: &[String]) -> Result<TypedAdapter, CliError> {
        let slashed = |name: &str| name.replace('\\', "/");
        let is_listed = |reading: &&v1::Adapter| {
            let is_it = |id: &String| {
                let names = [reading.id.clone(), slashed(&reading.id)];
                names
                    .iter()
                    .any(|name| name == id || adapter_stem(name) == Some(id))
            };
            std::path::Path::new(&reading.id).is_absolute() || listed.iter().any(is_it)
        };
        let found = self.readings.iter().find(is_listed);
        let meant = match (found, &self.problem) {
            (Some(found), _) => Some(found),
            // Only the whole text can be read as a name, and no adapter has that name.
            (None, Some(problem)) if self.readings.len() == 1 => {
                let text = &self.text;
                return Err(CliError::Usage(format!(
                    "--lora {text}: no LoRA is called so, and {problem}"
                )));
            }
            (None, _) => self.readings.last(),
        };
        Ok(TypedAdapter {
            readings: meant.cloned().into_iter().collect(),
            problem: None,
            text: self.text.clone(),
        })
    }

    /// The adapter that it means.
    pub(super) fn adapter(&self) -> v1::Adapter {
        self.readings.last().cloned().unwrap_or_default()
    }

    /// The adapter that a recipe names.
    pub(super) fn of_recipe(adapter: &RecipeAdapter) -> TypedAdapter {
        let curve = adapter.curve.iter();
        let reading = v1::Adapter {
            id: adapter.id.clone(),
            strength: adapter.curve.is_empty().then_some(adapter.strength),
            curve: curve
                .map(|&(position, strength)| v1::StrengthPoint { position, strength })
                .collect(),
            text_strength: adapter.text_strength,
            ignore_unknown: adapter.ignore_unknown,
        };
        TypedAdapter {
            text: adapter.id.clone(),
            readings: vec![reading],
            problem: None,
        }
    }
}

/// Resolves ambiguous adapters by the list of adapters. The list is requested only if a name could have a colon.
///
/// # Errors
/// When the list cannot be read, or an adapter has no meaning.
pub(super) async fn settle(
    adapters: &mut [TypedAdapter],
    listed: impl AsyncFnOnce() -> Result<Vec<String>, CliError>,
) -> Result<(), CliError> {
    if !adapters.iter().any(TypedAdapter::is_open) {
        return Ok(());
    }
    let listed = listed().await?;
    for adapter in adapters {
        *adapter = adapter.settled(&listed)?;
    }
    Ok(())
}

/// Names of the adapters of a service.
pub(super) async fn listed(connection: &Connection) -> Result<Vec<String>, CliError> {
    let listed = connection
        .residency()
        // A rescan, so that an adapter that was added a moment ago is listed: without it the text would mean another adapter.
        .list_models(v1::ListModelsRequest { rescan: true })
        .await?;
    let adapters = listed.into_inner().adapters.into_iter();
    Ok(adapters.map(|adapter| adapter.id).collect())
}

/// The parts of a text between its colons. Escaped colons do not separate.
fn parts_of(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    for (index, piece) in text.split(ESCAPED_COLON).enumerate() {
        for (place, part) in piece.split(':').enumerate() {
            match parts.last_mut() {
                Some(last) if place == 0 => {
                    if index > 0 {
                        last.push(':');
                    }
                    last.push_str(part);
                }
                _ => parts.push(part.to_owned()),
            }
        }
    }
    parts
}

/// An adapter from its name and its strengths for the transformer and the text encoders.
fn reading_of(name: &str, numbers: &[String]) -> Result<v1::Adapter, String> {
    let number = |text: &str| {
        let number = text
            .trim()
            .parse::<f32>()
            .ok()
            .filter(|number| number.is_finite());
        number.ok_or_else(|| format!("{text:?} is no strength; write a number such as 0.8"))
    };
    let strengths = numbers.first().map_or(Ok(Vec::new()), |strength| {
        strength.split(',').map(number).collect()
    });
    let strengths: Vec<f32> = strengths?;
    let last = strengths.len().saturating_sub(1).max(1) as f32;
    let points = strengths.iter().enumerate();
    let points = points.map(|(index, strength)| v1::StrengthPoint {
        position: index as f32 / last,
        strength: *strength,
    });
    Ok(v1::Adapter {
        id: path_or_name(name),
        strength: strengths.first().copied().filter(|_| strengths.len() == 1),
        curve: if strengths.len() > 1 {
            points.collect()
        } else {
            Vec::new()
        },
        text_strength: numbers.get(1).map(|text| number(text)).transpose()?,
        ignore_unknown: false,
    })
}

/// The absolute path of a file or folder on this machine, which a service on this machine can find; else the name.
fn path_or_name(id: &str) -> String {
    let is_path = id.starts_with(['.', '/']) || adapter_stem(id).is_some();
    let whole = is_path.then(|| std::fs::canonicalize(id).ok()).flatten();
    whole.map_or_else(|| id.to_owned(), |path| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The meaning of a text where these adapters are listed.
    fn meant(text: &str, listed: &[&str]) -> v1::Adapter {
        let listed: Vec<String> = listed.iter().map(|name| (*name).to_owned()).collect();
        TypedAdapter::parse(text)
            .unwrap()
            .settled(&listed)
            .unwrap()
            .adapter()
    }

    #[test]
    fn adapter_options_with_strengths_and_curves_are_parsed() {
        let of = |text: &str| meant(text, &["ink"]);
        assert_eq!(of("ink").strength, None);
        assert_eq!(of("styles/ink:0.5").strength, Some(0.5));
        let both = of("ink:-0.5:0");
        assert_eq!((both.strength, both.text_strength), (Some(-0.5), Some(0.0)));
        let curved = of("ink:1,0.5,0");
        let points: Vec<(f32, f32)> = curved.curve.iter().map(|p| (p.position, p.strength)).collect();
        assert_eq!(points, [(0.0, 1.0), (0.5, 0.5), (1.0, 0.0)]);
        assert_eq!(curved.strength, None);
    }

    #[test]
    fn a_name_with_colons_is_meant_where_it_is_listed() {
        let listed = ["v1", "v1:2", "a:b", "dir/x:0.5", "c:1:2"];
        for (text, name, strength, text_strength) in [
            ("v1:2", "v1:2", None, None),
            ("v1:2.0", "v1", Some(2.0), None),
            ("v1:3", "v1", Some(3.0), None),
            ("v1:2:0.5", "v1:2", Some(0.5), None),
            ("v1:2:0.5:0", "v1:2", Some(0.5), Some(0.0)),
            ("v1\\:2:0.5", "v1:2", Some(0.5), None),
            ("v1\\:3", "v1:3", None, None),
            ("a:b", "a:b", None, None),
            ("a:b.safetensors:0.5", "a:b.safetensors", Some(0.5), None),
            ("dir\\x:0.5", "dir\\x:0.5", None, None),
            ("c:1:2", "c:1:2", None, None),
            ("te,st:0.5", "te,st", Some(0.5), None),
        ] {
            let adapter = meant(text, &listed);
            let got = (&*adapter.id, adapter.strength, adapter.text_strength);
            assert_eq!(got, (name, strength, text_strength), "{text}");
        }
    }

    #[test]
    fn invalid_strengths_are_refused() {
        for text in ["ink:strong", "ink:nan", "ink:1,,2"] {
            let typed = TypedAdapter::parse(text).unwrap();
            assert!(typed.settled(&["ink".to_owned()]).is_err(), "{text}");
        }
        for text in ["", ":1", ":1:1"] {
            assert!(TypedAdapter::parse(text).is_err(), "{text}");
        }
    }
}
