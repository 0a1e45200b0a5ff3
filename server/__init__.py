"""The HTTP side: SGLang's own FastAPI app, with the `smc` object in requests, responses and documentation.

===============  ==================================================================================
module           what it holds
===============  ==================================================================================
`errors`         one error shape for every route that OpenAI clients use
`intake`         what a request body may say: unknown fields, model names, where `smc` travels
`exchange`       what the engine said about the request at hand: reports and refusals
`middleware`     the two ASGI layers that put the above around SGLang's routes
`models`         the response object `smc` and the body of `GET /v1/smc/config`
`openapi`        the same, in `/openapi.json`
`quiet`          keeps SGLang's Python warnings off the console
`app`            assembles them on SGLang's app
`launch`         runs SGLang's server with it
===============  ==================================================================================

Only the last two import sglang.
"""
