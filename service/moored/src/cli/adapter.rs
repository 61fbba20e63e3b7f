//! Adapters on the command line: `--lora NAME[:STRENGTH[:TEXT_STRENGTH]]`.

use crate::pictures::RecipeAdapter;
use crate::proto::v1;

/// Parses a name and its strengths. Several strengths, separated by commas, are a curve over the steps, at equal distances.
///
/// # Errors
/// What is no number.
pub(super) fn adapter_of(text: &str) -> Result<v1::Adapter, String> {
    let mut parts = text.split(':');
    let id = parts.next().unwrap_or_default();
    let (strength, text_strength, rest) = (parts.next(), parts.next(), parts.next());
    if id.is_empty() || rest.is_some() {
        return Err("write NAME, NAME:STRENGTH or NAME:STRENGTH:TEXT_STRENGTH".to_owned());
    }
    let number = |text: &str| {
        let number = text
            .trim()
            .parse::<f32>()
            .ok()
            .filter(|number| number.is_finite());
        number.ok_or_else(|| format!("{text:?} is no strength; write a number such as 0.8"))
    };
    let strengths = strength.map_or(Ok(Vec::new()), |strength| {
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
        id: path_or_name(id),
        strength: strengths.first().copied().filter(|_| strengths.len() == 1),
        curve: if strengths.len() > 1 {
            points.collect()
        } else {
            Vec::new()
        },
        text_strength: text_strength.map(number).transpose()?,
        ignore_unknown: false,
    })
}

/// The whole path of a file or folder that is here, by which a service of this machine knows it; else the name.
fn path_or_name(id: &str) -> String {
    let is_path = id.starts_with(['.', '/']) || id.ends_with(".safetensors");
    let whole = is_path.then(|| std::fs::canonicalize(id).ok()).flatten();
    whole.map_or_else(|| id.to_owned(), |path| path.display().to_string())
}

/// The adapter that a recipe tells of.
pub(super) fn of_recipe(adapter: &RecipeAdapter) -> v1::Adapter {
    let curve = adapter.curve.iter();
    v1::Adapter {
        id: adapter.id.clone(),
        strength: adapter.curve.is_empty().then_some(adapter.strength),
        curve: curve
            .map(|&(position, strength)| v1::StrengthPoint { position, strength })
            .collect(),
        text_strength: adapter.text_strength,
        ignore_unknown: adapter.ignore_unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapter_options_with_strengths_and_curves_are_parsed() {
        let of = |text: &str| adapter_of(text).unwrap();
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
    fn invalid_strengths_are_refused() {
        for text in ["", ":1", "ink:strong", "ink:1:1:1", "ink:nan", "ink:1,,2"] {
            assert!(adapter_of(text).is_err(), "{text}");
        }
    }
}
