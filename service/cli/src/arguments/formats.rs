//! Options for the formats of a model's weights, and for its adapters.

use std::collections::HashMap;

use api::v1;
use clap::Args;
use config::{ClientSettings, Config};
use media::Recipe;
use model::FULL;

use crate::adapter::{self, TypedAdapter};
use crate::connection::Connection;
use crate::{CliError, Program};

/// Formats of a model's weights, and its adapters.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Formats {
    /// Precision of the weights: full, 8-bit, 4-bit, or auto, which takes the best that fits the GPU [default: full, as they
    /// are stored; of `run`: auto]; MODEL+4-bit is the same
    #[arg(long, value_name = "PRESET", help_heading = "Weights")]
    quantization: Option<String>,
    /// Precision of one component (full, int8-convrot, int8, fp8, nf4, nf4-double), over the preset; may be repeated
    #[arg(long = "format", value_name = "COMPONENT=FORMAT", value_parser = component_and_format, help_heading = "Weights")]
    formats: Vec<(String, String)>,
    /// A LoRA, by its name in `moored models --adapters`, and its strength [default: 1]; may be repeated. NAME:0.8,
    /// NAME:1,0.5,0 changes it over the steps, NAME:0.8:0 sets another strength for the text encoders. A name with colons is
    /// written as it is listed; \: is a colon of the name in any case
    #[arg(long = "lora", value_name = "NAME[:STRENGTH]", value_parser = TypedAdapter::parse, help_heading = "Weights")]
    adapters: Vec<TypedAdapter>,
    /// Ignore LoRA tensors that match no layer of the model
    #[arg(long, requires = "adapters", help_heading = "Weights")]
    lora_ignore_unknown: bool,
}

fn component_and_format(text: &str) -> Result<(String, String), String> {
    let (component, format) = text
        .split_once('=')
        .filter(|(component, format)| !component.is_empty() && !format.is_empty())
        .ok_or("write a component and its format, such as transformer=nf4")?;
    Ok((component.to_owned(), format.to_owned()))
}

impl Formats {
    /// The formats and adapters in the recipe of a picture.
    pub(crate) fn of_recipe(recipe: &Recipe) -> Formats {
        let formats = recipe
            .model_key
            .rsplit_once('+')
            .map_or("", |(_, formats)| formats);
        let (named, presets): (Vec<&str>, Vec<&str>) =
            formats.split(',').partition(|each| each.contains('='));
        let preset = presets.first().filter(|preset| !matches!(**preset, "" | FULL));
        let named = named.into_iter().filter_map(|each| each.split_once('='));
        Formats {
            quantization: preset.map(|preset| (*preset).to_owned()),
            formats: named
                .map(|(component, format)| (component.to_owned(), format.to_owned()))
                .collect(),
            adapters: recipe.adapters.iter().map(TypedAdapter::of_recipe).collect(),
            lora_ignore_unknown: false,
        }
    }

    /// These formats and adapters. Where the command line names none, those of a recipe.
    #[must_use]
    pub(crate) fn or_those_of(&self, recipe: &Recipe) -> Formats {
        let formats = self.or_adapters_of(recipe);
        match self.is_empty() {
            true => Formats {
                adapters: formats.adapters,
                lora_ignore_unknown: formats.lora_ignore_unknown,
                ..Formats::of_recipe(recipe)
            },
            false => formats,
        }
    }

    /// The same formats. Where the command line names no adapters, those of a recipe.
    #[must_use]
    pub(crate) fn or_adapters_of(&self, recipe: &Recipe) -> Formats {
        let mut formats = self.clone();
        if formats.adapters.is_empty() {
            formats.adapters = Formats::of_recipe(recipe).adapters;
        }
        formats
    }

    /// Resolves ambiguous adapters, by the list of a service if that is needed.
    ///
    /// # Errors
    /// As [`adapter::settle`].
    pub(crate) async fn settle(&mut self, client: &ClientSettings) -> Result<(), CliError> {
        let listed = async || adapter::listed(&Connection::open(client).await?).await;
        adapter::settle(&mut self.adapters, listed).await
    }

    /// As [`Formats::settle`], by the list of this machine where no service answers.
    ///
    /// # Errors
    /// As [`adapter::settle`].
    pub(crate) async fn settle_here(
        &mut self,
        program: &dyn Program,
        config: &Config,
    ) -> Result<(), CliError> {
        let listed = async || match Connection::open(&config.client).await {
            Err(CliError::Unreachable { .. }) => Ok(program.adapters(config)),
            connection => adapter::listed(&connection?).await,
        };
        adapter::settle(&mut self.adapters, listed).await
    }

    /// The preset that the option names.
    pub(crate) fn preset(&self) -> Option<&str> {
        self.quantization.as_deref()
    }

    /// Whether the options name no format.
    pub(crate) fn is_empty(&self) -> bool {
        self.quantization.is_none() && self.formats.is_empty()
    }

    /// A reference to the model with this id, in these formats.
    ///
    /// # Errors
    /// When a component is named twice.
    pub(crate) fn of(&self, id: &str) -> Result<v1::ModelRef, CliError> {
        let mut components = HashMap::new();
        for (component, format) in &self.formats {
            if let Some(other) = components.insert(component.clone(), format.clone()) {
                return Err(CliError::Usage(format!(
                    "--format names {component} twice, as {other} and as {format}"
                )));
            }
        }
        let quantization = v1::Quantization {
            preset: self.quantization.clone().unwrap_or_default(),
            components,
        };
        Ok(v1::ModelRef {
            id: id.to_owned(),
            quantization: (!self.is_empty()).then_some(quantization),
            adapters: self
                .adapters
                .iter()
                .map(TypedAdapter::adapter)
                .map(|adapter| v1::Adapter {
                    ignore_unknown: adapter.ignore_unknown || self.lora_ignore_unknown,
                    ..adapter
                })
                .collect(),
            ..Default::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_parsed_from_a_key() {
        let of_key = |key: &str| {
            Formats::of_recipe(&Recipe {
                model_key: key.to_owned(),
                ..Recipe::default()
            })
        };
        let told = |key: &str| of_key(key).of("a").unwrap().quantization.map(|q| q.components);
        let both = told("me/a+b@1+text_encoder_2=nf4,transformer=int8").unwrap();
        assert_eq!((both.len(), both["transformer"].as_str()), (2, "int8"));
        assert_eq!((told("me/a+full"), told("a")), (None, None));
        let preset = of_key("me/a+4-bit").of("a").unwrap().quantization;
        assert_eq!(preset.map(|q| q.preset), Some("4-bit".to_owned()));
    }
}
