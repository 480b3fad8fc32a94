// A real provider of OpenID Connect (`oidc-provider`, certified) at a free port, which it prints as its first line.
// Whoever signs in as `ann` is in the groups of the third argument; the others give the one client that it knows.
import { createServer } from 'node:http';
import { Provider } from 'oidc-provider';

const [back, home, groups, secret] = process.argv.slice(2);
const server = createServer();
server.listen(0, '127.0.0.1', () => {
  const { port } = server.address();
  const provider = new Provider(`http://127.0.0.1:${port}`, {
    clients: [{
      client_id: 'tuneship',
      client_secret: secret,
      redirect_uris: [back],
      post_logout_redirect_uris: [home],
    }],
    claims: { openid: ['sub'], profile: ['name', 'groups'] },
    cookies: { keys: ['a test'] },
    findAccount: (_, id) => ({
      accountId: id,
      claims: () => ({ sub: id, name: 'Ann Weber', groups: id === 'ann' ? groups.split(',') : [] }),
    }),
  });
  server.on('request', provider.callback());
  console.log(port);
});
