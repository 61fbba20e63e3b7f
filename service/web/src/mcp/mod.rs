//! `/mcp`: the service as tools of an agent, by the Model Context Protocol over streamable HTTP. A tool makes the calls that every other
//! client makes, for the caller of its own request: its token, role and limits hold.

mod resources;
mod results;
mod tools;

use std::sync::Arc;

use calls::{Caller, Service};
use http::request::Parts;
use residency::Bytes;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, Implementation, ListResourceTemplatesResult,
    ListResourcesResult, ListToolsResult, PaginatedRequestParams, ReadResourceRequestParams,
    ReadResourceResponse, ServerCapabilities, ServerConfig,
};
use rmcp::service::RequestContext;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ErrorData, RoleServer, ServerHandler};
use tokio_util::sync::CancellationToken;
use transport::Admitted;

/// What an agent is told of the service.
const INSTRUCTIONS: &str = "Generates pictures, films and music on models of this machine. Names of models are those of list_models; \
    a request that names none takes the default. Results stay here for a day as resources (moored://jobs/JOB/NUMBER), which edit_image and \
    generate_video also take as pictures to start from. A film takes minutes: with wait false, generate_video returns at once, and \
    get_result waits for it. Where a request is refused, the message says what to do instead; what_fits says what a model needs before it is run.";

/// The tools of a service, for one agent.
#[derive(Clone)]
pub(crate) struct Agent {
    service: Service,
}

/// The endpoint. Sessions end with the service.
pub(crate) fn endpoint(
    service: Service,
    longest: Bytes,
) -> StreamableHttpService<Agent, LocalSessionManager> {
    let ended = CancellationToken::new();
    let (mut stopping, at_the_end) = (service.stopping.clone(), ended.clone());
    tokio::spawn(async move {
        let _ = stopping.wait_for(|stopping| *stopping).await; // a dropped sender means the same
        at_the_end.cancel();
    });
    let settings = StreamableHttpServerConfig::default()
        .disable_allowed_hosts() // the transport refuses pages of other sites, on every path
        .with_max_request_body_bytes(usize::try_from(longest.0).unwrap_or(usize::MAX))
        .with_json_response(true) // a file as one answer: clients bound the events of a stream
        .with_cancellation_token(ended);
    StreamableHttpService::new(
        move || {
            Ok(Agent {
                service: service.clone(),
            })
        },
        Arc::default(),
        settings,
    )
}

/// Who made a request: the transport has let it in.
struct Asker {
    caller: Caller,
    admitted: Option<Admitted>,
}

impl Asker {
    fn of(context: &RequestContext<RoleServer>) -> Result<Asker, ErrorData> {
        let parts = context.extensions.get::<Parts>();
        let parts =
            parts.ok_or_else(|| ErrorData::internal_error("the request came by no connection", None))?;
        Ok(Asker {
            caller: transport::caller(&parts.extensions),
            admitted: parts.extensions.get::<Admitted>().cloned(),
        })
    }
}

impl ServerHandler for Agent {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_resources()
            .build();
        let mut config = ServerConfig::new(capabilities);
        config.server_info = Implementation::new("moored", env!("CARGO_PKG_VERSION"));
        config.instructions = Some(INSTRUCTIONS.to_owned());
        config
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let asker = Asker::of(&context)?;
        Ok(ListToolsResult::with_all_items(tools::list(&asker)))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let asker = Asker::of(&context)?;
        let result = tools::call(&self.service, request, &asker, &context).await?;
        Ok(result.into())
    }

    async fn list_resources(
        &self,
        _request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let asker = Asker::of(&context)?;
        let resources = resources::list(&self.service, &asker.caller).await;
        Ok(ListResourcesResult::with_all_items(resources))
    }

    async fn list_resource_templates(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Ok(ListResourceTemplatesResult::with_all_items(vec![
            resources::template(),
        ]))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let asker = Asker::of(&context)?;
        let result = resources::read(&self.service, &request.uri, &asker).await?;
        Ok(result.into())
    }
}
